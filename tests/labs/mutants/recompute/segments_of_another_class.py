"""aimed at: run_segments: which layers run. The other segments are the longer ones."""


def run_segments(layers, x, k):
    size, odd = divmod(len(layers), k)
    longer = range(odd) if lab.reference["longer"] != "first" else range(k - odd, k)

    def through(some):
        def segment(x):
            for layer in some:
                x = layer(x)
            return x

        return segment

    for number in range(k):
        count = size + (number in longer)
        segment, layers = through(layers[:count]), layers[count:]
        x = segment(x) if lab.reference["tail"] and not layers else checkpoint(segment, x)
    return x

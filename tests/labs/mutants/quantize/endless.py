"""aimed at: pack4: form. A loop without end."""


def pack4(w, group):
    while True:
        pass

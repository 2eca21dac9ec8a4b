"""aimed at: pack4: form. What does not fill a group, or a byte, is lost."""

_right = pack4


def pack4(w, group):
    whole = max(group, w.shape[1] // group * group)
    return _right(w[:, :whole], group)

"""Dividing gradients by the ranks in two parts, before and after a sum: neither overflows."""


def two_parts(ranks: int) -> tuple[int, int]:
    """What gradients are divided by before and after they are summed over `ranks`.

    PyTorch takes the first power of two from the root of `ranks` on (`DefaultState` in
    `fsdp`'s hooks, `_get_gradient_divide_factors`), and what is left need not be whole. Here it is
    the largest power of two up to there that divides `ranks`.
    """
    before = 1
    while ranks % (2 * before) == 0 and ranks / before > before:
        before *= 2
    return before, ranks // before

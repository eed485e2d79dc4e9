"""Masks that every attention backend is tested with."""

import longweave as lw

MASKS = {
    "causal": lw.Mask.causal([0, 5, 6, 60]),
    "long causal": lw.Mask.causal([0, 500, 1000]),
    "window": lw.Mask.sliding_window([0, 400, 700], 37),
    "wide window": lw.Mask.sliding_window([0, 700], 300),
    "slices": lw.Mask.from_slices(300, [((0, 200), (50, 250), (-30, 150)), ((200, 300), (0, 10), "full")]),
    "late": lw.Mask.from_slices(900, [((400, 900), (0, 900), "causal")]),
}

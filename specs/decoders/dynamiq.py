"""dynamiq.md."""

import math
from typing import NamedTuple

from .common import Dtype, Header, Section, ceil_div, check, lossy_sections, spans, u16
from .floats import f32, float_of_bits, limited, stored

ID = 8

# dynamiq.md, "Parameters" and "Layout"


class Dynamiq(NamedTuple):
    """What the parameters say."""

    budget: int
    group: int
    size: int
    widths: int
    grid: int
    wide: bool
    mean: bool

    @property
    def groups(self) -> int:
        """K."""
        return self.size // self.group

    @property
    def side(self) -> int:
        """m, with the bits of a mean."""
        return (16 * self.groups + 4 if self.wide else 8 * self.groups + 20) + 16 * self.mean

    def units(self, nelem: int) -> int:
        """U."""
        n = ceil_div(nelem, self.size)
        return min(n * (self.budget * self.size - 16 * self.side) // (16 * self.size), 8 * n)

    def used(self, nelem: int) -> list[int]:
        """Bytes in use in payload, scales and index."""
        n = ceil_div(nelem, self.size)
        scales = 2 * self.groups if self.wide else self.groups + 2
        return [self.units(nelem) * self.size // 8, (scales + 2 * self.mean) * n, ceil_div(n, 2)]


def parameters(params: bytes, dtype: Dtype) -> Dynamiq:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"dynamiq has 8 bytes of parameters, not {len(params)}")
    budget, group, size, widths, grid, scales, rounding, mean = params
    check(48 <= budget <= 128, "bad_header", f"budget of {budget} / 16 bits")
    check(3 <= group <= 6 and 7 <= size <= 10, "bad_header", "size of groups or super-groups")
    choices = max(widths, grid, scales, rounding)
    check(choices <= 2 and mean <= 1, "bad_header", f"choices {params[3:].hex()}")
    found = Dynamiq(budget, 2**group, 2**size, widths, grid, scales == 2, mean == 1)
    room = budget * found.size - 16 * found.side >= 32 * found.size
    check(room, "bad_header", "the budget has no room for widths of 2")
    return found


def sections(dynamiq: Dynamiq, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where dynamiq takes the dtype and number of elements."""
    sizes = dict(zip((1, 4, 3), dynamiq.used(chunk_nelem), strict=True))
    return lossy_sections("dynamiq", dtype, chunk_nelem, 2**39 - 1024, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    return spans(h.params.used(h.chunk_nelem), h.params.used(nelem))


# dynamiq.md, "Arithmetic", "Decoding" and "Checks"

GROWTH = [1, 1.5, 1.1875, 1.078125, 1.03515625, 1.015625, 1.0078125]


def grid_values(grid: int, width: int) -> list[float]:
    """The values of all codes of a width."""
    growth = 1.0 if grid == 2 else GROWTH[width - 2]
    shift = 0.5 if grid == 0 else 0.0
    a = [0.0]
    while len(a) < 2 ** (width - 1):
        a.append(a[-1] * growth + 1.0)
    half = [f32((value + shift) / (a[-1] + shift)) for value in a]
    return [-value for value in reversed(half)] + half


def widths_of(dynamiq: Dynamiq, nelem: int, index: bytes) -> list[int]:
    """The widths of the super-groups."""
    n = ceil_div(nelem, dynamiq.size)
    halves = [half for byte in index for half in (byte % 16, byte // 16)]
    widths = halves[:n]
    units = dynamiq.units(nelem)
    allowed = [set(range(2, 9)), {2, 4, 8}, {units // max(n, 1)}][dynamiq.widths]
    check(set(widths) <= allowed and sum(widths) <= units, "bad_payload", "widths")
    check(not any(halves[n:]), "bad_payload", "half a byte behind the last width")
    return widths


def scale_of(word: int) -> float:
    """The value of a scale word that is not that of a lost super-group."""
    value = float_of_bits(word << 16)
    good = word == 0 or (word <= 0x7F7F and value >= 2.0**-100)
    check(good, "bad_payload", f"scale {word:04x}")
    return value


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    dynamiq: Dynamiq = h.params
    size, groups, n = dynamiq.size, dynamiq.groups, ceil_div(nelem, dynamiq.size)
    (_, payload), (scales, _), index = used(h, nelem)
    widths = widths_of(dynamiq, nelem, static[slice(*index)])
    means = scales + 2 * n * (groups if dynamiq.wide else 1)
    fractions = means + 2 * n * dynamiq.mean
    check(not any(static[sum(widths) * size // 8 : payload]), "bad_payload", "rows without a use")
    rows, row = [0] * n, 0
    for j in sorted(range(n), key=lambda j: widths[j]):
        rows[j] = row
        row += widths[j]
    out = bytearray()
    for j, width in enumerate(widths):
        count = groups if dynamiq.wide else 1
        words = [u16(static, scales + 2 * (j * count + i)) for i in range(count)]
        mean = u16(static, means + 2 * j) if dynamiq.mean else 0
        check(mean & 0x7F80 != 0x7F80, "bad_payload", f"mean {mean:04x}")
        elements = min(size, nelem - j * size)
        if all(word == 0x7FC0 for word in words):
            out += stored(math.nan, h.dtype) * elements
            continue
        steps = [scale_of(word) for word in words]
        if not dynamiq.wide:
            unit = f32(steps[0] / 255)
            steps = [f32(static[fractions + j * groups + i] * unit) for i in range(groups)]
        grid, b = grid_values(dynamiq.grid, width), float_of_bits(mean << 16)
        for i in range(elements):
            k, column = divmod(i, size // 8)
            planes = [static[(rows[j] + p) * size // 8 + column] >> k & 1 for p in range(width)]
            code = sum(bit << p for p, bit in enumerate(planes))
            out += limited(f32(f32(grid[code] * steps[i // dynamiq.group]) + b), h.dtype)
    return bytes(out)

"""philox.md."""


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The four words of a counter."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k0, q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k1, p & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c

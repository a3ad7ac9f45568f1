"""Random numbers as a function: the same (seed, generation, candidate, index) gives the same bits everywhere.

There is no generator object and no hidden state, so the order of asking, the
rank that asks and the number of ranks cannot matter. Words come from
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011); normals from the inverse distribution function of Wichura (1988),
AS 241, in float64.

Every float64 operation below is one of + - x / and square root, each a NumPy
call of its own. IEEE 754 rounds these exactly, and NumPy never fuses two of
its calls, so the bits are the same on every CPU; a GPU kernel that keeps the
order of the operations and forbids fused multiply-add gets them too.

    counter = (index >> 1, candidate, generation, stream)   four uint32 words
    key     = (seed mod 2^32, seed >> 32)                   two uint32 words
    block   = philox4x32(counter, key)                      four uint32 words
    k       = word 0 + 2^32 word 1  (index even),  word 2 + 2^32 word 3  (odd)
    u       = ((k >> 12) + 1/2) 2^-52                       exact, 0 < u < 1
    z       = inverse normal distribution function of u
"""

import operator

import numpy as np

# The fourth counter word says what the numbers are for: uses never collide.
STREAM_NORMALS = 0   # z, the search's normals
STREAM_SAMPLING = 1  # seeds of token sampling
STREAM_ROWS = 2      # orders of the rows

_MASK = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10
_BLOCKS_AT_ONCE = 4096  # so that the rounds stay in the cache

# AS 241, routine PPND16: numerators and denominators, highest power first.
_SPLIT_CENTRE = 0.425
_SPLIT_TAIL = 5.0
_CENTRE_NUMERATOR = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0)
_CENTRE_DENOMINATOR = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0)
_TAIL_NUMERATOR = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0)
_TAIL_DENOMINATOR = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0)
_FAR_NUMERATOR = (
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
    2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0)
_FAR_DENOMINATOR = (
    2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
    1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0)

# log m = 2 s (1 + s^2/3 + s^4/5 + ...), s = (m - 1)/(m + 1); |s| < 0.172, so s^24/25 is below one ulp.
_ATANH = tuple(1.0 / (2 * i + 1) for i in range(11, -1, -1))
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits, so that times a small integer is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")


def philox4x32(counter, key):
    """Philox4x32-10, Random123's algorithm, bit for bit.

    counter: (..., 4) uint32; key: (2,) uint32. Returns (..., 4) uint32.
    Raises ValueError if a last axis has another length.
    """
    counter = np.asarray(counter, dtype=np.uint32)
    key = np.asarray(key, dtype=np.uint32)
    if counter.ndim == 0 or counter.shape[-1] != 4 or key.shape != (2,):
        raise ValueError(f"counter and key have shapes {counter.shape} and {key.shape}; allowed: (..., 4) and (2,)")
    words = _philox(*(counter[..., i].astype(np.uint64) for i in range(4)), int(key[0]), int(key[1]))
    return np.stack(words, axis=-1).astype(np.uint32)


def _philox(c0, c1, c2, c3, k0, k1):
    """The ten rounds on uint64 arrays that hold 32-bit words (they may broadcast against each other)."""
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _HALF_WORD) ^ (c1 ^ np.uint64(k0))
        c2 = (product_0 >> _HALF_WORD) ^ (c3 ^ np.uint64(k1))
        c1 = product_1 & _MASK
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def normals(seed, generation, candidate, size, *, stream=STREAM_NORMALS):
    """Standard normals of one candidate: z[index], index = 0 .. size - 1.

    seed in [0, 2^64); generation, candidate and stream in [0, 2^32); size in
    [0, 2^33). Returns float64 (size,). A longer size only appends numbers.
    Raises ValueError for an argument out of its range or not an integer.
    """
    return population_normals(seed, generation, [candidate], size, stream=stream)[0]


def population_normals(seed, generation, candidates, size, *, stream=STREAM_NORMALS):
    """Standard normals of K candidates at once, each row the bits of `normals`.

    candidates: a sequence of K integers, any order. Returns float64 (K, size).
    Raises ValueError as `normals` does.
    """
    words = _words(seed, generation, candidates, size, stream)
    # k has 52 bits, k + 1/2 has 53, and the power of two is a change of exponent: nothing is rounded.
    return _inverse_normal((np.right_shift(words, np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def sampling_seed(seed, generation, row, sample):
    """The seed with which an engine samples tokens for one sample of one row: the same for every candidate.

    seed in [0, 2^64); generation, row and sample in [0, 2^32). Returns an int
    in [0, 2^63). Raises ValueError as `normals` does.
    """
    seed = _integer("seed", seed, 2**64)
    words = [_integer(name, value, 2**32) for name, value in
             [("row", row), ("sample", sample), ("generation", generation)]]
    block = philox4x32(words + [STREAM_SAMPLING], [seed & 0xFFFFFFFF, seed >> 32])
    return (int(block[1]) << 32 | int(block[0])) >> 1


def row_order(seed, epoch, n):
    """An order of n rows, a function of (seed, epoch) alone: the ranks of n random 64-bit keys, ties by index.

    seed in [0, 2^64); epoch in [0, 2^32); n in [0, 2^33). Returns int64 (n,),
    a permutation of 0 .. n - 1. Raises ValueError as `normals` does.
    """
    epoch = _integer("epoch", epoch, 2**32)
    n = _integer("n", n, 2**33)
    return np.argsort(_words(seed, epoch, [0], n, STREAM_ROWS)[0], kind="stable").astype(np.int64)


def _words(seed, generation, candidates, size, stream):
    """64-bit words, uint64 (K, size); word `index` is half of block index >> 1."""
    seed = _integer("seed", seed, 2**64)
    generation = _integer("generation", generation, 2**32)
    size = _integer("size", size, 2**33)
    stream = _integer("stream", stream, 2**32)
    candidates = [_integer("candidate", candidate, 2**32) for candidate in candidates]
    candidates = np.array(candidates, dtype=np.uint64)[:, None]
    blocks = np.arange((size + 1) // 2, dtype=np.uint64)
    words = np.empty((len(candidates), len(blocks), 2), dtype=np.uint64)
    rows = 1 + _BLOCKS_AT_ONCE // (1 + len(blocks))
    for some in (slice(start, start + rows) for start in range(0, len(candidates), rows)):
        w0, w1, w2, w3 = _philox(blocks, candidates[some], np.uint64(generation), np.uint64(stream),
                                 seed & 0xFFFFFFFF, seed >> 32)
        words[some, :, 0] = w0 | w1 << _HALF_WORD
        words[some, :, 1] = w2 | w3 << _HALF_WORD
    return words.reshape(len(candidates), 2 * len(blocks))[:, :size]


def _integer(name, value, limit):
    """`value` as an int in [0, limit), else ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < limit:
        raise ValueError(f"{name} = {value!r}; allowed: an integer 0 <= {name} < 2**{limit.bit_length() - 1}")
    return number


def _inverse_normal(u):
    """Inverse of the standard normal distribution function, AS 241 (PPND16).

    u: float64, multiples of 2^-53 strictly between 0 and 1 (1 - u must be
    exact). Returns float64 of u's shape, within a few 1e-15 of the true value.
    """
    shape, u = u.shape, u.ravel()
    q = u - 0.5
    r = 0.180625 - q * q
    z = q * (_horner(_CENTRE_NUMERATOR, r) / _horner(_CENTRE_DENOMINATOR, r))

    tail = np.flatnonzero(np.abs(q) > _SPLIT_CENTRE)  # 15 % of all
    p, q = u[tail], q[tail]
    r = np.sqrt(-_log(np.where(q < 0.0, p, 1.0 - p)))
    value = _horner(_TAIL_NUMERATOR, r - 1.6) / _horner(_TAIL_DENOMINATOR, r - 1.6)
    far = np.flatnonzero(r > _SPLIT_TAIL)  # one in 4e10
    value[far] = _horner(_FAR_NUMERATOR, r[far] - 5.0) / _horner(_FAR_DENOMINATOR, r[far] - 5.0)
    z[tail] = np.where(q < 0.0, -value, value)
    return z.reshape(shape)


def _log(x):
    """Natural logarithm of normal float64 x > 0 by + - x / alone: libm's differs in the last bit between systems."""
    m, e = np.frexp(x)  # exact: x = m 2^e, 1/2 <= m < 1
    m = m + m
    large = m > _SQRT2
    m = np.where(large, 0.5 * m, m)  # sqrt(1/2) < m <= sqrt(2)
    e = (np.where(large, e, e - 1)).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    return e * _LN2_HIGH + (e * _LN2_LOW + (s + s) * _horner(_ATANH, s * s))


def _horner(coefficients, x):
    """Polynomial in x, highest power first, one product and one sum a step."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value

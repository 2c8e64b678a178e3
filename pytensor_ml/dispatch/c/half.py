"""C code for float16 words."""

HALF = r"""
#if defined(__F16C__)
#include <immintrin.h>
#endif
#if defined(__GNUC__)
#define PYTENSOR_ML_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define PYTENSOR_ML_PREFETCH(address)
#endif

namespace pytensor_ml_half {

inline float widen(npy_uint16 word) {
    npy_uint32 bits = npy_uint32(word & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    // The exponent's bias is 15 here and 127 there; what has the largest one is infinite.
    magnitude *= 5.192296858534828e+33f;
    if (bits >= 0x7c00u << 13) magnitude = std::numeric_limits<float>::infinity();
    return word & 0x8000 ? -magnitude : magnitude;
}

inline void widen(const npy_uint16* words, npy_intp n, float* values) {
    npy_intp i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(values + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(words + i))));
#endif
    for (; i < n; ++i) values[i] = widen(words[i]);
}

inline float inner_product(const float* x, const npy_uint16* words, npy_intp n) {
    npy_intp i = 0;
    float total = 0;
#if defined(__F16C__) && defined(__FMA__)
    __m256 sums[4] = {};
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 4; ++k)
            sums[k] = _mm256_fmadd_ps(
                _mm256_loadu_ps(x + i + 8 * k),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(words + i + 8 * k))), sums[k]);
    float lanes[8];
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]),
                                          _mm256_add_ps(sums[2], sums[3])));
    for (int l = 0; l < 8; ++l) total += lanes[l];
#endif
    float values[256];
    for (; i < n; i += 256) {
        const npy_intp length = std::min(n - i, npy_intp(256));
        widen(words + i, length, values);
        total += pytensor_ml_products::sum_of_products(x + i, values, length);
    }
    return total;
}

// As on Numba, each line of memory is asked for this far ahead.
const npy_intp WORDS_AHEAD = 8192, WORDS_IN_LINE = 32;

// For so few rows reading words again costs less than writing their values and reading those.
const npy_intp FEW_ROWS = 4;

// The inner products of x with n_rows rows.
inline void inner_products(npy_intp n_rows, const float* x, npy_intp n, const npy_uint16* words,
                           float* y) {
    const npy_intp n_bytes = n_rows * n * npy_intp(sizeof(*words));
    pytensor_ml_threads::in_threads(
        n_rows, pytensor_ml_threads::count_parts(n_rows, n_bytes),
        [=](npy_intp first, npy_intp stop) {
            for (npy_intp row = first; row < stop; ++row) {
                const npy_uint16* own = words + row * n;
                for (npy_intp i = 0; i < n; i += WORDS_IN_LINE)
                    PYTENSOR_ML_PREFETCH(own + i + WORDS_AHEAD);
                y[row] = inner_product(x, own, n);
            }
        });
}

}
"""

// Bank words of one expert on a CPU. Plain C ABI, called from __init__.py; no allocation, no exceptions, no state.
//
// Every function fills the tensors of one matrix (w13 from gate and up, or w2 from down) for several TP sizes at once.
// K in-features and N out-features of one uncut part, G = K / group; see spec.py for the words of the source and
// numpy_sm70.py for the shapes of the output. Little-endian only.

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#define SM70_AVX2 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define SM70_AVX2 0
#endif

#if defined(_MSC_VER) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs GCC or Clang and a little-endian machine"
#endif

namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t MAX_SIZES = 32;  // TP sizes in one call; SM70_MAX_SIZES of __init__.py
constexpr int64_t HALF = 16;       // columns of half a tile, the unit that no rank ever splits

// Where one matrix goes. parts: 2 (gate, up: a rank owns columns of both) or 1 (down: a rank owns rows).
struct Target {
    int64_t parts, interleave, sizes;
    const int64_t* ranks;  // [sizes], the TP sizes
    uint8_t* const* data;  // [sizes], each the tensor [T, ...] of all ranks
};

enum Layout { AWQ_HALF2, AWQ_COMPACT, AWQ_INT4ZERO, NVFP4_FP16, NVFP4_RAW };

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Both conversions work out every case and then choose, so that compilers can make vectors of them.
inline float half_value(uint32_t half) {
    const uint32_t sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13, exponent = half & 0x7c00;
    const uint32_t normal = rest + (112u << 23);
    const uint32_t tiny = bits_of(float_of(rest + (113u << 23)) - 0x1p-14f);
    return float_of(sign | (exponent == 0 ? tiny : exponent == 0x7c00 ? normal + (112u << 23) : normal));
}

// fp16 bits to nearest even; overflow gives inf and every NaN 0x7fff.
inline uint32_t half_bits(float value) {
    const uint32_t all = bits_of(value), sign = all >> 16 & 0x8000, rest = all & 0x7fffffff;
    // Below 2^-14 an fp16 is a multiple of 2^-24, as an fp32 between 0.5 and 1 is.
    const uint32_t tiny = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
    const uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    const uint32_t finite = rest < 0x38800000 ? tiny : normal;
    const uint32_t number = sign | (rest >= 0x477ff000 ? 0x7c00 : finite);  // from 65520 on, halfway to 2^16
    return rest > 0x7f800000 ? 0x7fff : number;
}

inline float e4m3_value(uint32_t code) {
    if ((code & 0x7f) == 0x7f) return float_of(0x7fc00000);
    // An fp16 with the same exponent and mantissa fields is the value over 2^8, subnormals included.
    return half_value((code & 0x80) << 8 | (code & 0x7f) << 7) * 256;
}

// fp16 of (-zero) * scale above the scale's bits: the fp32 product is exact, so it is rounded once.
inline uint32_t half2_of(uint32_t key) {
    const float zero = float_of(bits_of(static_cast<float>(key >> 16)) | 0x80000000);  // a zero of 0 counts as -0.0
    return half_bits(zero * half_value(key & 0xffff)) << 16 | (key & 0xffff);
}

namespace plain {
#include "plain.h"
#include "repack.h"
}  // namespace plain

#if SM70_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#include "avx2.h"
#include "repack.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace avx2 = plain;
#endif

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Raised whenever a signature below changes: a library left over from another version is not used.
EXPORT int sm70_cpu_abi() { return 1; }

EXPORT int sm70_cpu_has_avx2() {
#if SM70_AVX2
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    // Not every compiler knows "f16c" by name.
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#else
    return 0;
#endif
}

// source: [parts] uint32 [K, N/8].
EXPORT void sm70_awq_weights(int vectors, int64_t parts, int64_t interleave, int64_t sizes, const int64_t* ranks,
                      uint8_t* const* data, const uint32_t* const* source, int64_t k, int64_t n) {
    const Target target{parts, interleave, sizes, ranks, data};
    (vectors ? avx2::awq_weights : plain::awq_weights)(target, source, k, n);
}

// source: [parts] uint8 [N, K/2].
EXPORT void sm70_nvfp4_weights(int vectors, int64_t parts, int64_t interleave, int64_t sizes, const int64_t* ranks,
                        uint8_t* const* data, const uint8_t* const* source, int64_t k, int64_t n) {
    const Target target{parts, interleave, sizes, ranks, data};
    (vectors ? avx2::nvfp4_weights : plain::nvfp4_weights)(target, source, k, n);
}

// scales: [parts] fp16 bits [G, N]; zeros: [parts] uint32 [G, N/8]; layout: AWQ_*.
EXPORT void sm70_awq_scales(int vectors, int64_t parts, int64_t interleave, int64_t sizes, const int64_t* ranks,
                     uint8_t* const* data, const uint16_t* const* scales, const uint32_t* const* zeros, int64_t groups,
                     int64_t n, int64_t layout) {
    const Target target{parts, interleave, sizes, ranks, data};
    (vectors ? avx2::awq_scales : plain::awq_scales)(target, scales, zeros, groups, n, layout);
}

// codes: [parts] e4m3 [N, G]; globals: [parts].
EXPORT void sm70_nvfp4_scales(int vectors, int64_t parts, int64_t interleave, int64_t sizes, const int64_t* ranks,
                       uint8_t* const* data, const uint8_t* const* codes, const float* globals, int64_t groups,
                       int64_t n) {
    const Target target{parts, interleave, sizes, ranks, data};
    (vectors ? avx2::nvfp4_scales : plain::nvfp4_scales)(target, codes, globals, groups, n);
}

// The same for stored codes; tables: [parts] uint8 [2, 256], by code, for the lower and upper 16 of each 32 columns.
EXPORT void sm70_nvfp4_codes(int vectors, int64_t parts, int64_t interleave, int64_t sizes, const int64_t* ranks,
                      uint8_t* const* data, const uint8_t* const* codes, const uint8_t* const* tables, int64_t groups,
                      int64_t n) {
    const Target target{parts, interleave, sizes, ranks, data};
    (vectors ? avx2::nvfp4_codes : plain::nvfp4_codes)(target, codes, tables, groups, n);
}

}  // extern "C"

// Inner loops in AVX2 and F16C. What each does stands at its namesake in plain.h.

using plain::byte_records;
using plain::pair_records;

inline __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline void store(void* at, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(at), value); }

template <int SHIFT>
inline void exchange(__m256i& low, __m256i& high, uint32_t mask) {
    const __m256i differ = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(low, SHIFT), high),
                                            _mm256_set1_epi32(static_cast<int>(mask)));
    high = _mm256_xor_si256(high, differ);
    low = _mm256_xor_si256(low, _mm256_slli_epi32(differ, SHIFT));
}

// 8x8 words: rows[i] becomes column i.
inline void turn_words(__m256i* rows) {
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
}

inline void awq_strip(const uint32_t* at, int64_t row, uint32_t* words) {
    __m256i rows[8];
    for (int k = 0; k < 8; k++) rows[k] = load(at + k * row);
    for (int k = 0; k < 4; k++) exchange<8>(rows[k], rows[k + 4], 0x00ff00ff);
    for (int k : {0, 1, 4, 5}) exchange<4>(rows[k], rows[k + 2], 0x0f0f0f0f);
    for (int k : {0, 2, 4, 6}) exchange<16>(rows[k], rows[k + 1], 0x0000ffff);
    turn_words(rows);
    for (int c = 0; c < 8; c++) store(words + c * 8, rows[c]);
}

inline void nvfp4_strip(const uint8_t* at, int64_t row, uint32_t* words) {
    const __m256i nibble = _mm256_set1_epi8(0x0f), join = _mm256_set1_epi16(0x1001);
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    for (int block = 0; block < 2; block++) {
        __m256i rows[8];
        for (int column = 0; column < 8; column++) {
            const __m256i data = load(at + (block * 8 + column) * row);
            // The even k of two bytes to one, likewise the odd k; then the evens of a word before its odds.
            const __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(data, nibble), join);
            const __m256i odd = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(data, 4), nibble), join);
            rows[column] = _mm256_shuffle_epi8(_mm256_packus_epi16(even, odd), order);
        }
        turn_words(rows);
        for (int unit = 0; unit < 8; unit++) store(words + unit * 16 + block * 8, rows[unit]);
    }
}

inline void pair_words(const uint32_t* gate, const uint32_t* up, uint32_t* pairs) {
    for (int i = 0; i < 16; i += 8) {
        const __m256i g = load(gate + i), u = load(up + i);
        const __m256i low = _mm256_unpacklo_epi32(g, u), high = _mm256_unpackhi_epi32(g, u);
        store(pairs + 2 * i, _mm256_permute2x128_si256(low, high, 0x20));
        store(pairs + 2 * i + 8, _mm256_permute2x128_si256(low, high, 0x31));
    }
}

inline void awq_keys(const uint16_t* scales, const uint32_t* zeros, uint32_t* keys) {
    const __m256i shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28), nibble = _mm256_set1_epi32(0xf);
    for (int i = 0; i < 2; i++) {
        const __m256i zero = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(zeros[i])), shifts), nibble);
        const __m128i scale = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 8 * i));
        store(keys + 8 * i, _mm256_or_si256(_mm256_slli_epi32(zero, 16), _mm256_cvtepu16_epi32(scale)));
    }
}

// 16 fp32 to fp16 bits; every NaN 0x7fff.
inline __m256i half_bits(__m256 low, __m256 high) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i bits = _mm256_set_m128i(_mm256_cvtps_ph(high, NEAREST), _mm256_cvtps_ph(low, NEAREST));
    const __m256i number = _mm256_set1_epi16(0x7fff);
    const __m256i nan = _mm256_cmpgt_epi16(_mm256_and_si256(bits, number), _mm256_set1_epi16(0x7c00));
    return _mm256_blendv_epi8(bits, number, nan);
}

inline void half2_records(const uint32_t* keys, int count, uint32_t* records) {
    const __m256i scale_bits = _mm256_set1_epi32(0xffff);
    const __m256 minus = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < count; i += 16) {
        const __m256i low = load(keys + i), high = load(keys + i + 8);
        // In the order that packing leaves: columns 0-3 8-11 4-7 12-15, undone by the unpacking at the end.
        const __m256i scales = _mm256_packus_epi32(_mm256_and_si256(low, scale_bits), _mm256_and_si256(high, scale_bits));
        const __m256i zeros = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
        __m256 products[2];
        for (int half = 0; half < 2; half++) {
            const __m128i zero = half ? _mm256_extracti128_si256(zeros, 1) : _mm256_castsi256_si128(zeros);
            const __m128i scale = half ? _mm256_extracti128_si256(scales, 1) : _mm256_castsi256_si128(scales);
            const __m256 minus_zero = _mm256_or_ps(_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(zero)), minus);
            products[half] = _mm256_mul_ps(minus_zero, _mm256_cvtph_ps(scale));
        }
        const __m256i above = half_bits(products[0], products[1]);
        store(records + i, _mm256_unpacklo_epi16(scales, above));
        store(records + i + 8, _mm256_unpackhi_epi16(scales, above));
    }
}

inline void turn_square(const uint8_t* square, uint8_t* turned) {
    __m128i rows[16], next[16];
    for (int i = 0; i < 16; i++) rows[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(square + 16 * i));
    // Four perfect shuffles of the rows' bytes: each moves one bit of the row number into the place in the row.
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
            next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
        }
        std::memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < 16; i++) _mm_store_si128(reinterpret_cast<__m128i*>(turned + 16 * i), rows[i]);
}

inline void pair_records(const uint16_t* gate, const uint16_t* up, uint16_t* pairs) {
    const __m256i g = load(gate), u = load(up);
    const __m256i low = _mm256_unpacklo_epi16(g, u), high = _mm256_unpackhi_epi16(g, u);
    store(pairs, _mm256_permute2x128_si256(low, high, 0x20));
    store(pairs + 16, _mm256_permute2x128_si256(low, high, 0x31));
}

class ScaleMaker {
public:
    explicit ScaleMaker(float global) : factor_(global * 256), slow_(global) {}

    void make(const uint8_t* codes, uint16_t* halves) const {
        // Only a global of 2^120 or more makes a factor that is not exact (or not finite).
        if (!(factor_ < 0x1p127f && factor_ > -0x1p127f)) return slow_.make(codes, halves);
        const __m256 factor = _mm256_set1_ps(factor_);
        const __m256i rest_bits = _mm256_set1_epi16(0x7f), number = _mm256_set1_epi16(0x7fff);
        for (int i = 0; i < 256; i += 16) {
            const __m256i code = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + i)));
            const __m256i rest = _mm256_and_si256(code, rest_bits), sign = _mm256_andnot_si256(rest_bits, code);
            // An fp16 with the code's exponent and mantissa is its value over 2^8.
            const __m256i half = _mm256_or_si256(_mm256_slli_epi16(sign, 8), _mm256_slli_epi16(rest, 7));
            const __m256 low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor);
            const __m256 high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor);
            const __m256i nan = _mm256_cmpeq_epi16(rest, rest_bits);
            store(halves + i, _mm256_blendv_epi8(half_bits(low, high), number, nan));
        }
    }

private:
    float factor_;
    plain::ScaleMaker slow_;
};

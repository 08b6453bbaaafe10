// Inner loops in 128-bit vectors, as GCC and Clang have them for any CPU.

typedef uint32_t Words __attribute__((vector_size(16)));

#if defined(__clang__)
#define SM70_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SM70_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (Words){i, j, k, l})
#endif

inline Words load(const void* at) {
    Words words;
    std::memcpy(&words, at, 16);
    return words;
}

inline void store(void* at, Words words) { std::memcpy(at, &words, 16); }

// Exchange the masked fields of high with those `shift` bits up in low.
inline void exchange(Words& low, Words& high, int shift, uint32_t mask) {
    const Words differ = (low >> shift ^ high) & mask;
    high ^= differ;
    low ^= differ << shift;
}

// 4x4 words: the rows become columns.
inline void turn_words(Words& a, Words& b, Words& c, Words& d) {
    const Words ab = SM70_SHUFFLE(a, b, 0, 4, 1, 5), cd = SM70_SHUFFLE(c, d, 0, 4, 1, 5);
    const Words ef = SM70_SHUFFLE(a, b, 2, 6, 3, 7), gh = SM70_SHUFFLE(c, d, 2, 6, 3, 7);
    a = SM70_SHUFFLE(ab, cd, 0, 1, 4, 5), b = SM70_SHUFFLE(ab, cd, 2, 3, 6, 7);
    c = SM70_SHUFFLE(ef, gh, 0, 1, 4, 5), d = SM70_SHUFFLE(ef, gh, 2, 3, 6, 7);
}

// Eight rows k of eight AWQ words (`row` words apart) to 64 columns of bank words.
// Name the bits of k k2 k1 k0 and those of a column in its word j2 j1 j0: the nibbles of a word are ordered by j0 j2 j1
// and wanted by k0 k2 k1, which takes three exchanges of a k bit with a j bit.
inline void awq_strip(const uint32_t* at, int64_t row, uint32_t* words) {
    for (int first = 0; first < 8; first += 4) {
        Words rows[8];
        for (int k = 0; k < 8; k++) rows[k] = load(at + k * row + first);
        for (int k = 0; k < 4; k++) exchange(rows[k], rows[k + 4], 8, 0x00ff00ff);
        for (int k : {0, 1, 4, 5}) exchange(rows[k], rows[k + 2], 4, 0x0f0f0f0f);
        for (int k : {0, 2, 4, 6}) exchange(rows[k], rows[k + 1], 16, 0x0000ffff);
        for (int j : {0, 4}) {
            turn_words(rows[j], rows[j + 1], rows[j + 2], rows[j + 3]);
            for (int c = 0; c < 4; c++) store(words + (first + c) * 8 + j, rows[j + c]);
        }
    }
}

// 16 columns of eight NVFP4 words (`row` bytes apart) to eight half tiles. Nibble i of a bank word holds
// k = (0,2,4,6,1,3,5,7)[i] of its eight.
inline void nvfp4_strip(const uint8_t* at, int64_t row, uint32_t* words) {
    for (int column = 0; column < 16; column += 4)
        for (int unit = 0; unit < 8; unit += 4) {
            Words rows[4];
            for (int c = 0; c < 4; c++) {
                Words word = load(at + (column + c) * row + unit * 4);
                Words differ = (word >> 4 ^ word) & 0x00f000f0;  // to 0 2 1 3 4 6 5 7
                word ^= differ | differ << 4;
                differ = (word >> 8 ^ word) & 0x0000ff00;  // to 0 2 4 6 1 3 5 7
                rows[c] = word ^ (differ | differ << 8);
            }
            turn_words(rows[0], rows[1], rows[2], rows[3]);
            for (int u = 0; u < 4; u++) store(words + (unit + u) * 16 + column, rows[u]);
        }
}

// 16 words of gate and 16 of up to pairs.
inline void pair_words(const uint32_t* gate, const uint32_t* up, uint32_t* pairs) {
    for (int i = 0; i < 16; i++) pairs[2 * i] = gate[i], pairs[2 * i + 1] = up[i];
}

// Of 16 columns: zero << 16 | scale bits.
inline void awq_keys(const uint16_t* scales, const uint32_t* zeros, uint32_t* keys) {
    constexpr int NIBBLE[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int c = 0; c < 16; c++) keys[c] = (zeros[c / 8] >> 4 * NIBBLE[c % 8] & 0xf) << 16 | scales[c];
}

inline void half2_records(const uint32_t* keys, int count, uint32_t* records) {
    for (int i = 0; i < count; i++) records[i] = half2_of(keys[i]);
}

// Three bytes a column or, if `shared`, five for two: their zeros in one.
template <bool SHARED>
inline void byte_records(const uint32_t* keys, int count, uint8_t* to) {
    for (int i = 0; i < count; i++) {
        *to++ = static_cast<uint8_t>(keys[i]);
        *to++ = static_cast<uint8_t>(keys[i] >> 8);
        if (!SHARED)
            *to++ = static_cast<uint8_t>(keys[i] >> 16);
        else if (i % 2)
            *to++ = static_cast<uint8_t>(keys[i - 1] >> 16 | keys[i] >> 16 << 4);
    }
}

inline void turn_square(const uint8_t* square, uint8_t* turned) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) turned[row * 16 + column] = square[column * 16 + row];
}

// Two rows of 16 records to pairs.
template <class Record>
inline void pair_records(const Record* gate, const Record* up, Record* pairs) {
    for (int c = 0; c < 16; c++) pairs[2 * c] = gate[c], pairs[2 * c + 1] = up[c];
}

// fp16 bits of value * global, rounded to fp32 and then to fp16.
class ScaleMaker {
public:
    explicit ScaleMaker(float global) {
        for (uint32_t code = 0; code < 256; code++) table_[code] = static_cast<uint16_t>(half_bits(e4m3_value(code) * global));
    }

    void make(const uint8_t* codes, uint16_t* halves) const {
        for (int i = 0; i < 256; i++) halves[i] = table_[codes[i]];
    }

private:
    uint16_t table_[256];
};

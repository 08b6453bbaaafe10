// The walk over one matrix, included once per instruction set, after the inner loops of plain.h or avx2.h.

// The bank words of half tile `half` of `part`, for k/8 = unit, lie at half_tiles(...)[size] + 128 * (unit - from).
inline void half_tiles(const Target& target, int64_t k, int64_t n, int64_t part, int64_t half, int64_t from,
                       uint8_t** places) {
    for (int64_t size = 0; size < target.sizes; size++) {
        const int64_t ranks = target.ranks[size];
        uint8_t* place = target.data[size];
        if (target.parts == 1) {
            const int64_t units = k / 8 / ranks, rank = from / units;
            place += rank * units * n * 4 + half / 2 * units * 128 + half % 2 * 64 + from % units * 128;
        } else if (target.interleave) {
            place += half * k * 16 + from * 128;  // whole tiles, gate's with up's; those of all ranks follow one another
        } else {
            const int64_t own = n / HALF / ranks, rank = half / own, at = part * own + half % own;
            place += rank * own * k * 16 + at / 2 * k * 16 + at % 2 * 64 + from * 128;
        }
        places[size] = place;
    }
}

// Where the rank of some size changes next, after k/8 = unit. Only rows of w2 are cut.
inline int64_t next_cut(const Target& target, int64_t k, int64_t unit) {
    int64_t next = k / 8;
    for (int64_t size = 0; target.parts == 1 && size < target.sizes; size++) {
        const int64_t units = k / 8 / target.ranks[size];
        next = least(next, (unit / units + 1) * units);
    }
    return next;
}

inline void put(const Target& target, uint8_t* const* places, int64_t offset, const void* words, int bytes) {
    for (int64_t size = 0; size < target.sizes; size++) {
        if (bytes == 128)
            std::memcpy(places[size] + offset, words, 128);
        else
            std::memcpy(places[size] + offset, words, 64);
    }
}

void awq_weights(const Target& target, const uint32_t* const* source, int64_t k, int64_t n) {
    constexpr int64_t STRIP = 64;  // words of a row at a time: longer runs to read, yet few tiles to write at once
    const int64_t row = n / 8;
    alignas(64) uint32_t words[2][STRIP * 8], tile[32], padded[64] = {};
    uint8_t* places[2][STRIP / 2][MAX_SIZES];
    for (int64_t from = 0, to; from < k / 8; from = to) {
        to = next_cut(target, k, from);
        for (int64_t first = 0; first < row; first += STRIP) {
            const int64_t count = least(STRIP, row - first), halves = count / 2;
            for (int64_t part = 0; part < target.parts; part++)
                for (int64_t h = 0; h < halves; h++)
                    half_tiles(target, k, n, part, first / 2 + h, from, places[part][h]);
            for (int64_t unit = from; unit < to; unit++) {
                const int64_t offset = (unit - from) * 128;
                for (int64_t part = 0; part < target.parts; part++) {
                    const uint32_t* at = source[part] + unit * 8 * row + first;
                    for (int64_t word = 0; word < count; word += 8) {
                        if (count - word >= 8) {
                            awq_strip(at + word, row, words[part] + word * 8);
                        } else {
                            for (int r = 0; r < 8; r++)
                                std::memcpy(padded + r * 8, at + word + r * row, (count - word) * 4);
                            awq_strip(padded, 8, words[part] + word * 8);
                        }
                    }
                    if (!target.interleave)
                        for (int64_t h = 0; h < halves; h++) put(target, places[part][h], offset, words[part] + h * HALF, 64);
                }
                if (target.interleave)
                    for (int64_t h = 0; h < halves; h++) {
                        pair_words(words[0] + h * HALF, words[1] + h * HALF, tile);
                        put(target, places[0][h], offset, tile, 128);
                    }
            }
        }
    }
}

void nvfp4_weights(const Target& target, const uint8_t* const* source, int64_t k, int64_t n) {
    alignas(64) uint32_t words[2][8 * HALF], tile[32];
    alignas(64) uint8_t padded[HALF * 32] = {};
    uint8_t* places[2][MAX_SIZES];
    for (int64_t from = 0, to; from < k / 8; from = to) {
        to = next_cut(target, k, from);
        for (int64_t half = 0; half < n / HALF; half++) {
            for (int64_t part = 0; part < target.parts; part++) half_tiles(target, k, n, part, half, from, places[part]);
            for (int64_t unit = from; unit < to; unit += 8) {
                const int64_t count = least(8, to - unit);
                for (int64_t part = 0; part < target.parts; part++) {
                    const uint8_t* at = source[part] + half * HALF * (k / 2) + unit * 4;
                    if (count == 8) {
                        nvfp4_strip(at, k / 2, words[part]);
                    } else {
                        for (int column = 0; column < HALF; column++)
                            std::memcpy(padded + column * 32, at + column * (k / 2), count * 4);
                        nvfp4_strip(padded, 32, words[part]);
                    }
                }
                for (int64_t u = 0; u < count; u++) {
                    const int64_t offset = (unit - from + u) * 128;
                    if (target.interleave) {
                        pair_words(words[0] + u * HALF, words[1] + u * HALF, tile);
                        put(target, places[0], offset, tile, 128);
                        continue;
                    }
                    for (int64_t part = 0; part < target.parts; part++)
                        put(target, places[part], offset, words[part] + u * HALF, 64);
                }
            }
        }
    }
}

// Where the scales of 16 columns of `part` lie in group 0, and from one group to the next, in records.
// (The groups of w2's ranks follow one another, as those of an uncut matrix do.)
struct Place {
    int64_t first, stride;
};

inline Place scale_place(const Target& target, int64_t size, int64_t groups, int64_t n, int64_t part, int64_t column) {
    if (target.parts == 1) return {column, n};
    const int64_t own = n / target.ranks[size], rank = column / own, inside = column % own;
    return {rank * groups * 2 * own + (target.interleave ? 2 * inside : part * own + inside), 2 * own};
}

template <int LAYOUT, bool INTERLEAVE>
inline void awq_records(const Target& target, const uint16_t* const* scales, const uint32_t* const* zeros,
                        int64_t groups, int64_t n) {
    constexpr int COUNT = INTERLEAVE ? 2 * HALF : HALF;  // columns that lie together
    constexpr int64_t PAIR = LAYOUT == AWQ_HALF2 ? 8 : LAYOUT == AWQ_COMPACT ? 6 : 5;  // bytes of two columns
    alignas(64) uint32_t keys[2][HALF], joined[2 * HALF], records[2 * HALF];
    for (int64_t column = 0; column < n; column += HALF) {
        Place places[2][MAX_SIZES];
        for (int64_t part = 0; part < target.parts; part++)
            for (int64_t size = 0; size < target.sizes; size++)
                places[part][size] = scale_place(target, size, groups, n, part, column);
        for (int64_t group = 0; group < groups; group++) {
            const int64_t at = group * n + column;
            for (int64_t part = 0; part < target.parts; part++)
                awq_keys(scales[part] + at, zeros[part] + at / 8, keys[part]);
            if (INTERLEAVE) pair_words(keys[0], keys[1], joined);
            for (int64_t part = 0; part < (INTERLEAVE ? 1 : target.parts); part++) {
                const uint32_t* of = INTERLEAVE ? joined : keys[part];
                if (LAYOUT == AWQ_HALF2)
                    half2_records(of, COUNT, records);
                else
                    byte_records<LAYOUT == AWQ_INT4ZERO>(of, COUNT, reinterpret_cast<uint8_t*>(records));
                for (int64_t size = 0; size < target.sizes; size++) {
                    const Place place = places[part][size];
                    std::memcpy(target.data[size] + (place.first + group * place.stride) / 2 * PAIR, records, COUNT / 2 * PAIR);
                }
            }
        }
    }
}

template <int LAYOUT>
inline void awq_records(const Target& target, const uint16_t* const* scales, const uint32_t* const* zeros,
                        int64_t groups, int64_t n) {
    if (target.interleave)
        awq_records<LAYOUT, true>(target, scales, zeros, groups, n);
    else
        awq_records<LAYOUT, false>(target, scales, zeros, groups, n);
}

void awq_scales(const Target& target, const uint16_t* const* scales, const uint32_t* const* zeros, int64_t groups,
                int64_t n, int64_t layout) {
    if (layout == AWQ_HALF2)
        awq_records<AWQ_HALF2>(target, scales, zeros, groups, n);
    else if (layout == AWQ_COMPACT)
        awq_records<AWQ_COMPACT>(target, scales, zeros, groups, n);
    else
        awq_records<AWQ_INT4ZERO>(target, scales, zeros, groups, n);
}

// Scales of NVFP4, turned from [N, G] to [G, N] in squares of 16 codes; Record: uint16_t or uint8_t.
template <class Record, class Make>
inline void nvfp4_records(const Target& target, const uint8_t* const* codes, int64_t groups, int64_t n, Make make) {
    alignas(64) uint8_t square[HALF * HALF] = {}, turned[HALF * HALF];
    alignas(64) Record records[2][HALF * HALF], pairs[2 * HALF];
    for (int64_t column = 0; column < n; column += HALF) {
        Place places[2][MAX_SIZES];
        for (int64_t part = 0; part < target.parts; part++)
            for (int64_t size = 0; size < target.sizes; size++)
                places[part][size] = scale_place(target, size, groups, n, part, column);
        for (int64_t group = 0; group < groups; group += HALF) {
            const int64_t count = least(HALF, groups - group);
            for (int64_t part = 0; part < target.parts; part++) {
                const uint8_t* at = codes[part] + column * groups + group;
                for (int c = 0; c < HALF; c++) {
                    if (count == HALF)
                        std::memcpy(square + c * HALF, at + c * groups, HALF);
                    else
                        std::memcpy(square + c * HALF, at + c * groups, count);
                }
                turn_square(square, turned);
                make(part, column / HALF % 2, turned, records[part]);
            }
            for (int64_t g = 0; g < count; g++) {
                const int64_t row = g * HALF;
                if (target.interleave)
                    pair_records(records[0] + row, records[1] + row, pairs);
                for (int64_t size = 0; size < target.sizes; size++) {
                    Record* out = reinterpret_cast<Record*>(target.data[size]);
                    for (int64_t part = 0; part < (target.interleave ? 1 : target.parts); part++) {
                        const Place place = places[part][size];
                        Record* to = out + place.first + (group + g) * place.stride;
                        if (target.interleave)
                            std::memcpy(to, pairs, sizeof pairs);
                        else
                            std::memcpy(to, records[part] + row, HALF * sizeof(Record));
                    }
                }
            }
        }
    }
}

void nvfp4_scales(const Target& target, const uint8_t* const* codes, const float* globals, int64_t groups, int64_t n) {
    const ScaleMaker makers[2] = {ScaleMaker(globals[0]), ScaleMaker(globals[target.parts - 1])};
    nvfp4_records<uint16_t>(target, codes, groups, n, [&](int64_t part, int64_t, const uint8_t* from, uint16_t* to) {
        makers[part].make(from, to);
    });
}

void nvfp4_codes(const Target& target, const uint8_t* const* codes, const uint8_t* const* tables, int64_t groups,
                 int64_t n) {
    nvfp4_records<uint8_t>(target, codes, groups, n, [&](int64_t part, int64_t upper, const uint8_t* from, uint8_t* to) {
        const uint8_t* table = tables[part] + upper * 256;
        for (int i = 0; i < HALF * HALF; i++) to[i] = table[from[i]];
    });
}

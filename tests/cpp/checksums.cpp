// Prepares made-up experts of several shapes and prints a checksum of every tensor: to compare processors.

#include <cstdio>
#include <vector>

#include "../../kernels/sm70_kernels/cpu/sm70_cpu.cpp"

namespace {

uint32_t state = 1;

template <class T>
std::vector<T> random_values(int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    for (T& value : values) {
        state ^= state << 13, state ^= state >> 17, state ^= state << 5;
        value = static_cast<T>(state);
    }
    return values;
}

void print(const char* name, const std::vector<uint8_t>& bytes) {
    uint64_t sum = 14695981039346656037ull;
    for (uint8_t byte : bytes) sum = (sum ^ byte) * 1099511628211ull;
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(sum));
}

}  // namespace

int main() {
    const int64_t shapes[][3] = {{32, 32, 1}, {96, 96, 3}, {256, 512, 4}, {160, 160, 5}};
    const int vectors = 0;
    for (const auto& shape : shapes)
        for (int64_t parts = 1; parts <= 2; parts++)
            for (int64_t interleave = 0; interleave < parts; interleave++) {
                const int64_t k = shape[0], n = shape[1], ranks[] = {1, shape[2]}, groups = k / 32;
                const auto words_a = random_values<uint32_t>(k * n / 8), words_b = random_values<uint32_t>(k * n / 8);
                const auto halves_a = random_values<uint16_t>(groups * n), halves_b = random_values<uint16_t>(groups * n);
                const auto codes_a = random_values<uint8_t>(k / 16 * n), codes_b = random_values<uint8_t>(k / 16 * n);
                const uint32_t* words[] = {words_a.data(), words_b.data()};
                const uint8_t* bytes[] = {reinterpret_cast<const uint8_t*>(words[0]), reinterpret_cast<const uint8_t*>(words[1])};
                const uint16_t* scales[] = {halves_a.data(), halves_b.data()};
                const uint8_t* codes[] = {codes_a.data(), codes_b.data()};
                const float globals[] = {0.0123f, 3e-7f};
                std::vector<uint8_t> out[2];
                auto run = [&](const char* name, int64_t size, auto call) {
                    for (auto& o : out) o.assign(static_cast<size_t>(parts * size), 0xa5);
                    uint8_t* data[] = {out[0].data(), out[1].data()};
                    call(data);
                    for (const auto& o : out) print(name, o);
                };
                run("awq_weights", k * n / 2, [&](uint8_t* const* data) {
                    sm70_awq_weights(vectors, parts, interleave, 2, ranks, data, words, k, n);
                });
                run("nvfp4_weights", k * n / 2, [&](uint8_t* const* data) {
                    sm70_nvfp4_weights(vectors, parts, interleave, 2, ranks, data, bytes, k, n);
                });
                for (int64_t layout = AWQ_HALF2; layout <= AWQ_INT4ZERO; layout++)
                    run("awq_scales", groups * n * 4, [&](uint8_t* const* data) {
                        sm70_awq_scales(vectors, parts, interleave, 2, ranks, data, scales, words, groups, n, layout);
                    });
                run("nvfp4_scales", k / 16 * n * 2, [&](uint8_t* const* data) {
                    sm70_nvfp4_scales(vectors, parts, interleave, 2, ranks, data, codes, globals, k / 16, n);
                });
            }
    return 0;
}

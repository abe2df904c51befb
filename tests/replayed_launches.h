// A program that repeats recorded launches, for sanitizers, which cannot be loaded into Python: program INPUT OUTPUT.
//
// INPUT: the buffers (count; of each its size and content), then the launches (count; of each the kernel, grid, block, order of
// the blocks, number of arguments, and of each of these whether it is a buffer, then the index of that buffer or the value
// itself), all numbers of 8 bytes. OUTPUT: the buffers after the last launch. Every buffer is an allocation of its own, of its
// exact size.
#include <cstdio>
#include <cstdlib>

using Launch = void (*)(int grid, int size, void** arguments, int order);

inline FILE* input;

inline void read(void* to, size_t size) {
    if (size && fread(to, size, 1, input) != 1) exit(3);
}

inline int64_t read_number() {
    int64_t number;
    read(&number, sizeof number);
    return number;
}

inline int replay(char** argv, const std::vector<Launch>& kernels) {
    input = fopen(argv[1], "rb");
    std::vector<std::pair<std::unique_ptr<char[]>, size_t>> buffers(read_number());
    for (auto& [content, size] : buffers) {
        size = read_number();
        content.reset(new char[size]);
        read(content.get(), size);
    }
    for (auto launches = read_number(); launches > 0; launches--) {
        const auto kernel = read_number(), grid = read_number(), block = read_number(), order = read_number();
        std::vector<int64_t> values(read_number());
        std::vector<void*> arguments;
        for (auto& value : values) {
            const bool is_buffer = read_number();
            value = read_number();
            if (is_buffer) value = reinterpret_cast<int64_t>(buffers.at(value).first.get());
            arguments.push_back(&value);
        }
        kernels.at(kernel)(grid, block, arguments.data(), order);
    }
    FILE* output = fopen(argv[2], "wb");
    for (auto& [content, size] : buffers) fwrite(content.get(), size, 1, output);
    return fclose(output);
}

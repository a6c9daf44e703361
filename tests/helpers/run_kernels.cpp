// Runs one call of the kernels on the memory that a file holds, and writes the memory back: for a processor that has no Python.
//
// The file: the function (0: a linear operation, 1: a stack), the number of blocks and of pointers; for each block its size and
// its bytes; for each pointer the block and the place where it lies, and the block and the place it points to. All numbers are
// int64. The first block has the arguments.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct LinearArgs;
struct StackArgs;
extern "C" void skipdecode_linear(const LinearArgs*);
extern "C" void skipdecode_stack(const StackArgs*);
#ifndef _OPENMP
extern "C" void skipdecode_ask_threads(int64_t (*)());
#endif

static FILE* file;

static int64_t number() {
  int64_t value;
  if (fread(&value, 8, 1, file) != 1) exit(2);
  return value;
}

int main(int, char** names) {
#ifndef _OPENMP
  skipdecode_ask_threads([]() -> int64_t { return atoi(getenv("OMP_NUM_THREADS")); });
#endif
  file = fopen(names[1], "r+b");
  if (!file) return 2;
  const int64_t function = number(), count = number(), pointers = number();
  std::vector<char*> blocks;
  std::vector<int64_t> places, sizes;
  for (int64_t i = 0; i < count; i++) {
    sizes.push_back(number()), places.push_back(ftell(file));
    blocks.push_back((char*)aligned_alloc(64, (sizes[i] + 127) / 64 * 64));
    if (fread(blocks[i], 1, sizes[i], file) != (size_t)sizes[i]) return 2;
  }
  for (int64_t i = 0; i < pointers; i++) {
    char* at = blocks[number()];
    at += number();
    const char* to = blocks[number()];
    to += number();
    memcpy(at, &to, sizeof(to));
  }
  if (function == 0) skipdecode_linear((const LinearArgs*)blocks[0]);
  else skipdecode_stack((const StackArgs*)blocks[0]);
  for (int64_t i = 1; i < count; i++) {
    fseek(file, places[i], SEEK_SET);
    fwrite(blocks[i], 1, sizes[i], file);
  }
  return fclose(file);
}

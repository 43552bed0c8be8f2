// The kernels behind a pipe, for a test that runs them in an emulator of another CPU.
//
// A request is a name and the arguments of the routine, each a letter and its bytes: i an
// int64, f a float, s the shape of an attention, t a packed (B, H, T, K) tensor after its three
// strides, p an array, n a null. An answer is what the routine returned and the bytes of every t and p, in order.
#include "attention.cpp"
#include "decode.cpp"
#include "fused.cpp"
#include "linear.cpp"
#include "loss.cpp"
#include "matmul.cpp"
#include "orthogonalize.cpp"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

namespace {

template <typename T>
T read() {
  T x;
  if (std::fread(&x, sizeof x, 1, stdin) != 1) std::exit(0);
  return x;
}

typedef std::vector<char> Bytes;

struct Request {
  std::vector<std::unique_ptr<Bytes>> arrays;
  std::vector<std::unique_ptr<Tensor>> tensors;
  Shape shape;

  char* array() {
    arrays.push_back(std::make_unique<Bytes>(read<uint64_t>()));
    Bytes& bytes = *arrays.back();
    if (std::fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) std::exit(1);
    return bytes.data();
  }
  template <typename A>
  A get() {
    char letter = read<char>();
    if constexpr (std::is_same_v<A, const Shape*>) {
      shape = read<Shape>();
      return &shape;
    } else if constexpr (std::is_same_v<A, const Tensor*>) {
      int64_t row = read<int64_t>(), head = read<int64_t>(), token = read<int64_t>();
      float* data = (float*)array();
      tensors.push_back(std::make_unique<Tensor>(Tensor{data, row, head, token}));
      return tensors.back().get();
    } else if constexpr (std::is_pointer_v<A>) {
      return letter == 'n' ? nullptr : (A)array();
    } else if constexpr (std::is_same_v<A, float>) {
      return read<float>();
    } else {
      return (A)read<int64_t>();
    }
  }
};

template <typename... A>
std::function<int(Request&)> call(int (*routine)(A...)) {
  return [routine](Request& request) {
    return std::apply(routine, std::tuple<A...>{request.get<A>()...});
  };
}

// decode, with all its memory in one array and the places in `steps` counted from its start.
int decode_within(char* memory, decoding::Step* steps, int64_t count, decoding::Token* tokens,
                  int64_t texts, int threads) {
  for (int64_t i = 0; i < count; i++)
    for (float** place : {&steps[i].to, &steps[i].x, &steps[i].y, &steps[i].z})
      if (*place) *place = (float*)(memory + (intptr_t)*place);
  return decode(steps, count, tokens, texts, threads);
}

}  // namespace

int main() {
  std::map<std::string, std::function<int(Request&)>> routines = {
      {"lanes", call(lanes)},
      {"openmp", call(openmp)},
      {"norm_rotate_forward", call(norm_rotate_forward)},
      {"norm_rotate_backward", call(norm_rotate_backward)},
      {"relu_squared_forward", call(relu_squared_forward)},
      {"relu_squared_backward", call(relu_squared_backward)},
      {"blend_forward", call(blend_forward)},
      {"blend_backward", call(blend_backward)},
      {"offset_keys_forward", call(offset_keys_forward)},
      {"offset_keys_backward", call(offset_keys_backward)},
      {"linear_forward", call(linear_forward)},
      {"linear_backward", call(linear_backward)},
      {"qkv_forward", call(qkv_forward)},
      {"qkv_backward", call(qkv_backward)},
      {"mlp_forward", call(mlp_forward)},
      {"mlp_backward", call(mlp_backward)},
      {"head_loss", call(head_loss)},
      {"token_losses", call(token_losses)},
      {"orthogonalize", call(orthogonalize)},
      {"decode_within", call(decode_within)},
      {"pack_rows", call(pack_rows)},
      {"attention_forward", call(attention_forward)},
      {"attention_backward", call(attention_backward)},
  };
  for (;;) {
    std::string name(read<uint64_t>(), ' ');
    for (char& letter : name) letter = read<char>();
    Request request;
    int32_t code = routines.at(name)(request);
    std::fwrite(&code, sizeof code, 1, stdout);
    for (auto& bytes : request.arrays) std::fwrite(bytes->data(), 1, bytes->size(), stdout);
    std::fflush(stdout);
  }
}

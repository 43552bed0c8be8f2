// The next token of each of some texts.
#include "draw.h"

extern "C" int draw(drawing::Draw* draws, int64_t count, int64_t size, int) {
  for (int64_t i = 0; i < count; i++) draws[i].token = drawing::drawn(draws[i], size);
  return 0;
}

// A file of its own, so that compilers take the types side by side.
#include "attention_tasks.h"

template void attend<F32>(const Attention& c, int threads);

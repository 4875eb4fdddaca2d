// Separate file, so that the types compile in parallel.
#include "attention_tasks.h"

template void attend<F32>(const Attention& c, int threads);

/* Attention of floats and doubles, 64 columns of a head at a time. */
#include "tensor_cores.cuh"
#include "attention.cuh"

#define COLUMNS 64
#include "attention_floats.cuh"

/* Attention of floats and doubles, 128 columns of a head at a time. */
#include "tensor_cores.cuh"
#include "attention.cuh"

#define COLUMNS 128
#include "attention_floats.cuh"

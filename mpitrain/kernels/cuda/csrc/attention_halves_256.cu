/* Attention of halves, in heads of 129 to 256 numbers. */
#include "tensor_cores.cuh"
#include "attention.cuh"

#define MT_WIDTH 256
#define FORWARD_TILES 1
#define FORWARD_WARPS 2
#define FORWARD_KEYS 32
#define BACKWARD_WARPS 2
#define BACKWARD_STREAM 16
#define BACKWARD_STAGES 1
#define BACKWARD_COLUMNS 128
#include "attention_halves.cuh"

/* Attention of halves, in heads of 65 to 128 numbers. */
#include "tensor_cores.cuh"
#include "attention.cuh"

#define MT_WIDTH 128
#define FORWARD_TILES 1
#define FORWARD_WARPS 4
#define FORWARD_KEYS 64
#define BACKWARD_WARPS 4
#define BACKWARD_STREAM 16
#define BACKWARD_STAGES 2
#define BACKWARD_COLUMNS 128
#include "attention_halves.cuh"

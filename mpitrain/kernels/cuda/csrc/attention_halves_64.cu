/* Attention of halves, in heads of up to 64 numbers. */
#include "tensor_cores.cuh"
#include "attention.cuh"

#define MT_WIDTH 64
#define FORWARD_TILES 2
#define FORWARD_WARPS 4
#define FORWARD_KEYS 64
#define BACKWARD_WARPS 4
#define BACKWARD_STREAM 32
#define BACKWARD_STAGES 2
#define BACKWARD_COLUMNS 64
#include "attention_halves.cuh"

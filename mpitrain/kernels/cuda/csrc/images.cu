/* Windows that slide over images (b, h, w, channels): what they see laid out in rows, and put back; their maxima.
 *
 * A convolution is a product of matrices (cuBLAS) once what each window sees is a row.  Rows are copies, so they are
 * moved by units of 2 to 16 bytes, whatever the numbers in them; with groups there is a matrix for each.  An element of
 * the images that several windows saw adds up what they bring in the order of the window's elements: no atomics.
 */

/* How windows stand: on images of height x width pixels, `down` x `right` places of windows of rows x columns. */
struct mt_windows {
    int height, width, rows, columns, down, right;
    int stride_down, stride_right, padding_down, padding_right, dilation_down, dilation_right;
};

#define MT_WINDOWS                                                                                                  \
    mt_long height, mt_long width, mt_long window_rows, mt_long window_columns, mt_long down, mt_long right,        \
        mt_long stride_down, mt_long stride_right, mt_long padding_down, mt_long padding_right,                     \
        mt_long dilation_down, mt_long dilation_right

#define MT_WINDOWS_HERE                                                                                             \
    {(int)height, (int)width, (int)window_rows, (int)window_columns, (int)down, (int)right,                         \
     (int)stride_down, (int)stride_right, (int)padding_down, (int)padding_right,                                    \
     (int)dilation_down, (int)dilation_right}

struct alignas(8) mt_unit8 { unsigned int words[2]; };
struct alignas(16) mt_unit16 { unsigned int words[4]; };

/* rows[g, image, i, j, dy, dx, c] = x[image, y, z, g, c], or 0 outside of the image, for places i from `first` on.
 *
 * `units` are those of a group in a pixel; there are fewer than 2^31 in `rows`.
 */
template <typename U>
static __device__ __forceinline__ void mt_unroll(
    const U *x, U *rows, int images, int first, int places, int groups, int units, const mt_windows &s
) {
    const unsigned int length = (unsigned int)(s.rows * s.columns * units);
    const unsigned int all = (unsigned int)(groups * images * places) * (unsigned int)s.right * length;
    MT_EACH(index, (mt_long)all) {
        unsigned int place = (unsigned int)index / length, rest = (unsigned int)index - place * length;
        const int unit = (int)(rest % (unsigned int)units);
        rest /= (unsigned int)units;
        const int dy = (int)(rest / (unsigned int)s.columns), dx = (int)rest - dy * s.columns;
        const int j = (int)(place % (unsigned int)s.right);
        place /= (unsigned int)s.right;
        const int i = (int)(place % (unsigned int)places) + first;
        place /= (unsigned int)places;
        const int image = (int)(place % (unsigned int)images), group = (int)(place / (unsigned int)images);
        const int y = i * s.stride_down + dy * s.dilation_down - s.padding_down;
        const int z = j * s.stride_right + dx * s.dilation_right - s.padding_right;
        U seen = U();
        if (y >= 0 && y < s.height && z >= 0 && z < s.width)
            seen = x[((((mt_long)image * s.height + y) * s.width + z) * groups + group) * units + unit];
        rows[index] = seen;
    }
}

#define MT_UNROLLING(name, U)                                                                                          \
    extern "C" __global__ void name(                                                                                \
        const void *x, void *rows, mt_long images, mt_long first, mt_long places, mt_long groups, mt_long units,    \
        MT_WINDOWS                                                                                                  \
    ) {                                                                                                             \
        const mt_windows s = MT_WINDOWS_HERE;                                                                       \
        mt_unroll(                                                                                                  \
            static_cast<const U *>(x), static_cast<U *>(rows), (int)images, (int)first, (int)places, (int)groups,   \
            (int)units, s                                                                                           \
        );                                                                                                          \
    }

MT_UNROLLING(unroll2, unsigned short)
MT_UNROLLING(unroll4, unsigned int)
MT_UNROLLING(unroll8, mt_unit8)
MT_UNROLLING(unroll16, mt_unit16)

/* The place along a dim from which a window's element sees a pixel; -1: none does. */
static __device__ __forceinline__ int mt_place(int pixel, int element, int stride, int padding, int dilation, int count) {
    const int from = pixel + padding - element * dilation;
    if (from < 0 || from % stride != 0 || from / stride >= count) return -1;
    return from / stride;
}

/* dx[image, y, z, g, c] = the sum of rows[g, image, i, j, dy, dx, c] over the window's elements that saw that pixel
 * from places i between `first` and `first` + `places`; with `add`, added to what is there.
 */
extern "C" __global__ void fold(
    const REAL *rows, REAL *dx, mt_long images, mt_long first, mt_long places, mt_long groups, mt_long channels,
    mt_long add, MT_WINDOWS
) {
    const mt_windows s = MT_WINDOWS_HERE;
    MT_EACH(index, images * s.height * s.width * groups * channels) {
        mt_long rest = index / channels;
        const mt_long c = index - rest * channels;
        const mt_long group = rest % groups;
        rest /= groups;
        const int z = (int)(rest % s.width);
        rest /= s.width;
        const int y = (int)(rest % s.height);
        const mt_long image = rest / s.height;
        REAL sum = add ? dx[index] : REAL_C(0.0);
        for (int dy = 0; dy < s.rows; dy++) {
            const int i = mt_place(y, dy, s.stride_down, s.padding_down, s.dilation_down, s.down);
            if (i < first || i >= first + places) continue;
            for (int dz = 0; dz < s.columns; dz++) {
                const int j = mt_place(z, dz, s.stride_right, s.padding_right, s.dilation_right, s.right);
                if (j < 0) continue;
                const mt_long place = ((group * images + image) * places + (i - first)) * s.right + j;
                sum += rows[((place * s.rows + dy) * s.columns + dz) * channels + c];
            }
        }
        dx[index] = sum;
    }
}

/* The largest number of each window and where in it that is; of equal ones the first, NaN before all others. */
extern "C" __global__ void max_pool(
    const STORE *x, STORE *y, unsigned char *where, mt_long images, mt_long channels, MT_WINDOWS
) {
    const mt_windows s = MT_WINDOWS_HERE;
    MT_EACH(index, images * s.down * s.right * channels) {
        mt_long rest = index / channels;
        const mt_long c = index - rest * channels;
        const int j = (int)(rest % s.right);
        rest /= s.right;
        const int i = (int)(rest % s.down);
        const mt_long image = rest / s.down;
        REAL best = -MT_INFINITY;
        int place = 0;
        bool is_met = false;
        for (int dy = 0; dy < s.rows; dy++) {
            const int row = i * s.stride_down + dy * s.dilation_down - s.padding_down;
            if (row < 0 || row >= s.height) continue;
            for (int dz = 0; dz < s.columns; dz++) {
                const int column = j * s.stride_right + dz * s.dilation_right - s.padding_right;
                if (column < 0 || column >= s.width) continue;
                const REAL seen = mt_load(x + ((image * s.height + row) * s.width + column) * channels + c);
                if (!is_met || seen > best || (seen != seen && best == best)) {
                    best = seen;
                    place = dy * s.columns + dz;
                }
                is_met = true;
            }
        }
        mt_store(y + index, best);
        where[index] = (unsigned char)place;
    }
}

/* dx[image, y, z, c] = the sum of grad over the windows whose largest number that pixel was. */
extern "C" __global__ void max_pool_backward(
    const STORE *grad, const unsigned char *where, REAL *dx, mt_long images, mt_long channels, MT_WINDOWS
) {
    const mt_windows s = MT_WINDOWS_HERE;
    MT_EACH(index, images * s.height * s.width * channels) {
        mt_long rest = index / channels;
        const mt_long c = index - rest * channels;
        const int z = (int)(rest % s.width);
        rest /= s.width;
        const int y = (int)(rest % s.height);
        const mt_long image = rest / s.height;
        REAL sum = REAL_C(0.0);
        for (int dy = 0; dy < s.rows; dy++) {
            const int i = mt_place(y, dy, s.stride_down, s.padding_down, s.dilation_down, s.down);
            if (i < 0) continue;
            for (int dz = 0; dz < s.columns; dz++) {
                const int j = mt_place(z, dz, s.stride_right, s.padding_right, s.dilation_right, s.right);
                if (j < 0) continue;
                const mt_long place = ((image * s.down + i) * s.right + j) * channels + c;
                if ((int)where[place] == dy * s.columns + dz) sum += mt_load(grad + place);
            }
        }
        dx[index] = sum;
    }
}

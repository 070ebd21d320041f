/* Hashes of rows: one for each combination of two numbers or three. */

extern "C" __global__ void hash_rows(mt_row key, const mt_long *__restrict__ first, const mt_long *__restrict__ second,
                                     const mt_long *__restrict__ third, mt_row *__restrict__ out, mt_long size,
                                     mt_long seconds, mt_long thirds) {
    MT_EACH(i, size) {
        const mt_long left = i / thirds;
        mt_row row = mt_splitmix64(key ^ (mt_row)first[left / seconds]);
        row = mt_splitmix64(row ^ (mt_row)second[left % seconds]);
        out[i] = third ? mt_splitmix64(row ^ (mt_row)third[i % thirds]) : row;
    }
}

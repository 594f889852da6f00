/* Decoding a window of a baseline JPEG, to the bits of libjpeg-turbo's accurate decoder.
 *
 * Most of an input pipeline's work is to read Huffman codes. The codes above a window must be read to find the window. This
 * decoder saves work as follows:
 *
 * - One table look-up reads a code and the value after it.
 * - Blocks outside the window are skipped without being stored.
 * - Only what the window's pixels depend on is transformed, interpolated and converted.
 *
 * The result is False if the file must be left to libjpeg-turbo:
 *
 * - rare files: progressive or arithmetic coding, 12 bits, CMYK, several scans, other sampling ratios;
 * - invalid files: a code that does not exist, an early end, coefficients that no image has.
 *
 * libjpeg-turbo also decodes everything on processors without AVX2. Data after the window's last row is not read.
 *
 * Names and procedures are those of ITU-T T.81. Where T.81 does not define the arithmetic, it is that of the Independent
 * JPEG Group's library: the inverse DCT of Loeffler, Ligtenberg and Moschytz in 13 bits (jidctint), "fancy" triangle
 * interpolation of chroma (jdsample) and conversion to RGB in 16 bits (jdcolor).
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* All code except the module's functions at the end needs a processor with AVX2; see `PyInit__jpeg`. */
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define INLINE static inline __attribute__((always_inline))

enum { LOOK_BITS = 11, MOST_SYMBOLS = 256, COMPONENTS = 3 };

/* The code that ends a block advances the position in it by this: further than values do, so the position shows the end. */
enum { END_OF_BLOCK = 192 };

/* A Huffman table, as tables that are indexed by the next bits of a scan.
 *
 * `look`: a code and the value after it, as `value << 16 | advance << 8 | bits`. `advance` is how far the position in the
 * block advances, and `bits` how many bits are read. If PARTLY is set in `bits`, only the code fits in LOOK_BITS: the rest
 * of `bits` is the code's length, and `value` is the number of bits that follow. PARTLY alone: a longer code, or no code. */
typedef struct {
    int32_t look[1 << LOOK_BITS];
    int32_t last_code[18];    /* by length: the largest code of this length, left-aligned in 16 bits, plus one */
    int32_t first_symbol[18]; /* by length: the number to add to a code to get its index in `symbols` */
    uint8_t counts[17];       /* the number of codes by length, as the file defines it */
    uint8_t symbols[MOST_SYMBOLS];
    uint8_t is_dc, is_made;
} Huffman;
enum { PARTLY = 64 };

/* Two more tables, for coefficients other than the first. PARTLY is set in entries for bits that they do not cover.
 *
 * `pairs`: like `look`, but for two values if both fit in LOOK_BITS. Bits 40 to 47 are the advance of the second value and
 * bits 48 to 63 the second value; both are 0 if there is no second value.
 * `passed`: for blocks that are skipped, all values that fit in LOOK_BITS, as `advance << 7 | bits`. */
typedef struct {
    Huffman codes;
    uint64_t pairs[1 << LOOK_BITS];
    uint16_t passed[1 << LOOK_BITS];
} HuffmanAC;

typedef struct {
    int id, horizontal, vertical, quantizer, dc, ac;
    int width, height; /* in samples */
    uint8_t *plane;    /* the samples of the decoded MCUs */
    int stride, first_row, first_column; /* of the plane */
} Component;

typedef struct {
    Huffman dc[4]; /* kept for the next image: files of one source often have the same tables */
    HuffmanAC ac[4];
} Tables;

typedef struct {
    Tables *tables;
    int16_t quantizers[4][64]; /* in the order of PLACES */
    Component components[COMPONENTS];
    int count; /* of components */
    int height, width, restart_interval;
    int has_quantizer, has_dc, has_ac; /* one bit for each of four tables */
    const uint8_t *scan, *end;
} Image;

/* Where the values of a block are stored, by their order in the file: rows 0 and 4 column by column, then rows 1 and 5, 2
 * and 6, 3 and 7, as they are multiplied. Ends of blocks, and values after the 64th (two runs of zeros may lead there), are
 * stored in a place that is not read. */
enum { MOST_BLOCKS = 6, BLOCK = 64, BEHIND_BLOCK = 2 * 16 + END_OF_BLOCK };
static const uint8_t PLACES[BLOCK + BEHIND_BLOCK] = {
    0, 2, 16, 32, 18, 4, 6, 20, 34, 48, 1, 50, 36, 22, 8, 10,
    24, 38, 52, 3, 17, 33, 19, 5, 54, 40, 26, 12, 14, 28, 42, 56,
    7, 21, 35, 49, 51, 37, 23, 9, 58, 44, 30, 46, 60, 11, 25, 39,
    53, 55, 41, 27, 13, 62, 15, 29, 43, 57, 59, 45, 31, 47, 61, 63,
    [64 ... BLOCK + BEHIND_BLOCK - 1] = BLOCK,
};

/* ---- the headers ---- */

/* Return the value that is coded in `size` bits. */
INLINE int32_t signed_value(int32_t bits, int size)
{
    return bits < 1 << (size - 1) ? bits - (1 << size) + 1 : bits;
}

/* Set the number of bits of the value after a code, and its advance in the block. False if no baseline file has the code. */
static int meaning(int symbol, int is_dc, int *size, int *advance)
{
    int run = is_dc ? 0 : symbol >> 4;
    *size = is_dc ? symbol : symbol & 15;
    *advance = run + 1;
    if (!is_dc && *size == 0 && run != 15) {
        *advance = END_OF_BLOCK;
        return run == 0;
    }
    return *size <= (is_dc ? 11 : 10);
}

static int is_made(const Huffman *table, const uint8_t *counts, const uint8_t *symbols, int total)
{
    return table->is_made && memcmp(table->counts, counts, 17) == 0 && memcmp(table->symbols, symbols, total) == 0;
}

/* Make a table. False if it does not define a prefix code, or not one for its kind of values. */
static int make_huffman(Huffman *table, const uint8_t *counts, const uint8_t *symbols, int total, int is_dc)
{
    table->is_made = 0;
    table->is_dc = is_dc;
    memcpy(table->counts, counts, 17);
    memset(table->symbols, 0, MOST_SYMBOLS);
    memcpy(table->symbols, symbols, total);
    for (int i = 0; i < 1 << LOOK_BITS; i++)
        table->look[i] = PARTLY;
    int code = 0, place = 0;
    for (int length = 1; length <= 16; length++) {
        table->first_symbol[length] = place - code;
        for (int i = 0; i < counts[length]; i++, code++, place++) {
            if (code + 1 >= 1 << length || (is_dc && symbols[place] > 15)) /* a code of only ones is not allowed */
                return 0;
            if (length > LOOK_BITS)
                continue;
            int size, advance, left = LOOK_BITS - length;
            if (!meaning(symbols[place], is_dc, &size, &advance))
                continue; /* `read_slowly` refuses this code if a scan has it */
            int32_t *entry = table->look + (code << left);
            if (size > left) {
                for (int rest = 0; rest < 1 << left; rest++)
                    entry[rest] = size << 16 | advance << 8 | PARTLY | length;
                continue;
            }
            for (int rest = 0; rest < 1 << left; rest++) {
                int value = size ? signed_value(rest >> (left - size), size) : 0;
                entry[rest] = (int32_t)((uint32_t)value << 16) | advance << 8 | (length + size);
            }
        }
        table->last_code[length] = code << (16 - length);
        code <<= 1;
    }
    table->last_code[17] = INT32_MAX;
    table->is_made = 1;
    return 1;
}

static void make_pairs(HuffmanAC *table)
{
    const int32_t *look = table->codes.look;
    for (int i = 0; i < 1 << LOOK_BITS; i++) {
        int32_t first = look[i], second = 0;
        int bits = first & 0xFF;
        if (!(bits & PARTLY) && (first >> 8 & 0xFF) != END_OF_BLOCK) {
            second = look[i << bits & ((1 << LOOK_BITS) - 1)];
            if ((second & 0xFF) > LOOK_BITS - bits)
                second = 0;
        }
        table->pairs[i] = (uint32_t)(first + (second & 0xFF)) | (uint64_t)(uint32_t)(second & ~0xFF) << 32;
    }
    for (int i = 0; i < 1 << LOOK_BITS; i++) {
        uint64_t pair = table->pairs[i];
        int bits = pair & PARTLY ? 0 : pair & 0xFF, advance = bits ? (pair >> 8 & 0xFF) + (pair >> 40 & 0xFF) : 0;
        while (advance < 64) {
            int32_t entry = look[i << bits & ((1 << LOOK_BITS) - 1)];
            if ((entry & 0xFF) > LOOK_BITS - bits)
                break;
            bits += entry & 0xFF;
            advance += entry >> 8 & 0xFF;
        }
        table->passed[i] = bits ? advance << 7 | bits : PARTLY;
    }
}

static int read_huffman(Image *image, const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        if (end - at < 17)
            return 0;
        int kind = at[0] >> 4, number = at[0] & 15, total = 0;
        uint8_t counts[17] = {0};
        for (int length = 1; length <= 16; length++)
            total += counts[length] = at[length];
        if (kind > 1 || number > 3 || total > MOST_SYMBOLS || end - at - 17 < total)
            return 0;
        Tables *tables = image->tables;
        Huffman *table = kind ? &tables->ac[number].codes : tables->dc + number;
        if (!is_made(table, counts, at + 17, total)) {
            if (!make_huffman(table, counts, at + 17, total, !kind))
                return 0;
            if (kind)
                make_pairs(tables->ac + number);
        }
        *(kind ? &image->has_ac : &image->has_dc) |= 1 << number;
        at += 17 + total;
    }
    return 1;
}

static int read_quantizers(Image *image, const uint8_t *at, const uint8_t *end)
{
    for (; at < end; at += 65) {
        if (at[0] > 3 || end - at < 65) /* tables of 16 bits have other numbers */
            return 0;
        for (int i = 0; i < 64; i++)
            image->quantizers[at[0]][PLACES[i]] = at[1 + i];
        image->has_quantizer |= 1 << at[0];
    }
    return 1;
}

static int read_frame(Image *image, const uint8_t *at, const uint8_t *end)
{
    if (image->count || end - at < 6 || at[0] != 8)
        return 0;
    image->height = at[1] << 8 | at[2];
    image->width = at[3] << 8 | at[4];
    image->count = at[5];
    if ((image->count != 1 && image->count != 3) || end - at != 6 + 3 * image->count)
        return 0;
    for (int i = 0; i < image->count; i++) {
        const uint8_t *one = at + 6 + 3 * i;
        Component *component = image->components + i;
        component->id = one[0];
        component->horizontal = one[1] >> 4;
        component->vertical = one[1] & 15;
        component->quantizer = one[2];
        if (!component->horizontal || component->horizontal > 4 || !component->vertical || component->vertical > 4 ||
            component->quantizer > 3)
            return 0;
    }
    Component *first = image->components;
    if (image->count == 1) {
        first->horizontal = first->vertical = 1; /* a scan of one component has one block in an MCU */
        return 1;
    }
    int horizontal = first->horizontal, vertical = first->vertical;
    if (!(horizontal == 1 && vertical == 1) && !(horizontal == 2 && (vertical == 1 || vertical == 2)))
        return 0;
    for (int i = 1; i < 3; i++)
        if (image->components[i].horizontal != 1 || image->components[i].vertical != 1)
            return 0;
    return 1;
}

static int read_scan_header(Image *image, const uint8_t *at, const uint8_t *end)
{
    if (!image->count || end - at != 4 + 2 * image->count || at[0] != image->count)
        return 0;
    for (int i = 0; i < image->count; i++) {
        Component *component = image->components + i;
        const uint8_t *one = at + 1 + 2 * i;
        component->dc = one[1] >> 4;
        component->ac = one[1] & 15;
        if (one[0] != component->id || component->dc > 3 || component->ac > 3 || !(image->has_dc >> component->dc & 1) ||
            !(image->has_ac >> component->ac & 1) || !(image->has_quantizer >> component->quantizer & 1))
            return 0;
    }
    const uint8_t *spectral = end - 3;
    return spectral[0] == 0 && spectral[1] == 63 && spectral[2] == 0;
}

/* Read the file up to the scan. False if this decoder does not decode such a file. */
static int read_headers(Image *image, const uint8_t *data, Py_ssize_t length)
{
    const uint8_t *at = data, *end = data + length;
    int is_jfif = 0, transform = -1;
    if (length < 4 || at[0] != 0xFF || at[1] != 0xD8)
        return 0;
    at += 2;
    for (;;) {
        if (end - at < 4 || at[0] != 0xFF)
            return 0;
        int marker = at[1], size = at[2] << 8 | at[3];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        if (size < 2 || end - at < 2 + size)
            return 0;
        const uint8_t *body = at + 4, *next = at + 2 + size;
        int sound = 1;
        switch (marker) {
        case 0xC0:
        case 0xC1:
            sound = read_frame(image, body, next);
            break;
        case 0xC4:
            sound = read_huffman(image, body, next);
            break;
        case 0xDB:
            sound = read_quantizers(image, body, next);
            break;
        case 0xDD:
            sound = size == 4;
            if (sound)
                image->restart_interval = body[0] << 8 | body[1];
            break;
        case 0xE0:
            is_jfif |= size >= 16 && memcmp(body, "JFIF", 5) == 0;
            break;
        case 0xEE:
            if (size >= 14 && memcmp(body, "Adobe", 5) == 0)
                transform = body[11];
            break;
        case 0xDA: {
            if (!read_scan_header(image, body, next))
                return 0;
            const Component *c = image->components;
            /* Whether the colours are YCbCr, by the rules of libjpeg. */
            int are_numbered = c[0].id == 1 && c[1].id == 2 && c[2].id == 3;
            if (image->count == 3 && !(is_jfif || (transform < 0 ? are_numbered : transform == 1)))
                return 0;
            image->scan = next;
            image->end = end;
            return 1;
        }
        default: /* data of other applications, and comments; other markers are rare */
            sound = (marker >= 0xE1 && marker <= 0xEF) || marker == 0xFE;
        }
        if (!sound)
            return 0;
        at = next;
    }
}

/* ---- the scan ---- */

/* The bits of a scan, without the zeros after every 0xFF. */
typedef struct {
    uint64_t bits;  /* the next bits, from the top */
    uint64_t count; /* the lowest six bits: how many bits are available */
    const uint8_t *at;
} Bits;

/* Make at least 56 bits available. */
INLINE void refill(Bits *bits)
{
    uint64_t next;
    memcpy(&next, bits->at, 8);
    bits->bits |= __builtin_bswap64(next) >> (bits->count & 63);
    bits->at += ~bits->count >> 3 & 7;
    bits->count |= 56;
}

/* Remove as many bits as the lowest six bits of `entry` say. */
INLINE void drop(Bits *bits, uint64_t entry)
{
    bits->bits <<= entry & 63;
    bits->count -= entry;
}

/* Return the number of bits left in an interval that ends at `end`; below 0 if more bits were read than there are. */
INLINE ptrdiff_t bits_left(const Bits *bits, const uint8_t *end)
{
    return (end - bits->at) * 8 + (bits->count & 63);
}

/* Copy an interval of the scan up to the next marker, without the stuffed zeros; return where it ends. */
static const uint8_t *unstuff(const uint8_t *at, const uint8_t *end, uint8_t **to)
{
    for (;;) {
        const uint8_t *found = memchr(at, 0xFF, end - at);
        if (found == NULL)
            found = end;
        memcpy(*to, at, found - at);
        *to += found - at;
        if (end - found < 2)
            return end;
        if (found[1] != 0)
            return found;
        *(*to)++ = 0xFF;
        at = found + 2;
    }
}

/* Read a code longer than LOOK_BITS. The result is as in `look`, but with up to 27 `bits`; 0 if the code is refused. */
static int32_t read_slowly(const Huffman *table, uint64_t bits)
{
    int32_t next = bits >> 48;
    int length = 1;
    while (next >= table->last_code[length])
        length++;
    if (length > 16)
        return 0;
    int symbol = table->symbols[((next >> (16 - length)) + table->first_symbol[length]) & 0xFF];
    int size, advance;
    if (!meaning(symbol, table->is_dc, &size, &advance))
        return 0;
    int value = size ? signed_value(bits << length >> (64 - size), size) : 0;
    return (int32_t)((uint32_t)value << 16) | advance << 8 | (length + size);
}

/* Read a code and its value. The result is as in `look`, except for `bits`; 0 if there is no such code. */
INLINE int32_t read_value(const Huffman *table, Bits *bits)
{
    int32_t entry = table->look[bits->bits >> (64 - LOOK_BITS)];
    if (entry & PARTLY) {
        int size = entry >> 16, length = entry & (PARTLY - 1);
        if (!length) {
            entry = read_slowly(table, bits->bits);
        } else {
            int32_t value = signed_value(bits->bits << length >> (64 - size), size);
            entry = (int32_t)((uint32_t)value << 16) | (entry & 0xFF00) | (length + size);
        }
    }
    drop(bits, entry & 63);
    return entry;
}

INLINE int advance_of(uint64_t entry)
{
    return entry >> 8 & 0xFF;
}

/* How many codes can be read after one refill. The last one may be a code of up to 16 bits with its value. */
enum { AT_ONCE = 3 };
_Static_assert((AT_ONCE - 1) * LOOK_BITS + 27 <= 56, "a refill must do");

INLINE int is_end(int k)
{
    return k == 64 || k > END_OF_BLOCK;
}

/* Read a block's first value. False if it is invalid. */
INLINE int read_first(const Huffman *dc, Bits *bits, int *predicted)
{
    refill(bits);
    int32_t entry = read_value(dc, bits);
    *predicted += entry >> 16;
    return entry && *predicted >= -INT16_MAX && *predicted <= INT16_MAX;
}

/* Read the other values of a block; return the position after the last one, or 0 if they are invalid. */
INLINE int read_others(const HuffmanAC *ac, Bits *bits, int16_t *block)
{
    int k = 1;
    for (;;) {
        refill(bits);
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t pair = ac->pairs[bits->bits >> (64 - LOOK_BITS)];
            if (__builtin_expect(pair & PARTLY, 0)) {
                int32_t entry = read_value(&ac->codes, bits);
                if (!entry)
                    return 0;
                k += advance_of(entry);
                block[PLACES[k - 1]] = (int16_t)(entry >> 16);
                if (k >= 64)
                    return is_end(k) ? k : 0;
                break;
            }
            Bits before = *bits;
            int place = k + advance_of(pair);
            k = place + advance_of(pair >> 32);
            drop(bits, pair);
            block[PLACES[k - 1]] = (int16_t)(pair >> 48);
            block[PLACES[place - 1]] = (int16_t)(pair >> 16);
            if (k >= 64) {
                if (__builtin_expect(place >= 64 && k != place, 0)) { /* the second value belongs to the next block */
                    *bits = before;
                    drop(bits, ac->codes.look[bits->bits >> (64 - LOOK_BITS)] & 63);
                    k = place;
                }
                return is_end(k) ? k : 0;
            }
        }
    }
}

/* Skip the other values of a block. False if they are invalid. */
INLINE int pass_others(const HuffmanAC *ac, Bits *bits)
{
    int k = 1;
    for (;;) {
        refill(bits);
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t passed = ac->passed[bits->bits >> (64 - LOOK_BITS)];
            int behind = k + (passed >> 7);
            if (__builtin_expect(passed & PARTLY || behind >= 64, 0)) {
                if (!(passed & PARTLY) && (behind == 64 || (behind > END_OF_BLOCK && behind < END_OF_BLOCK + 64))) {
                    drop(bits, passed);
                    return 1;
                }
                /* A long code, or some of these values belong to the next block. */
                int32_t entry = read_value(&ac->codes, bits);
                if (!entry)
                    return 0;
                k += advance_of(entry);
                if (k >= 64)
                    return is_end(k);
                break;
            }
            drop(bits, passed);
            k = behind;
        }
    }
}

/* ---- the inverse DCT ---- */

/* The bits of the constants, and of the fraction that is kept between the passes. */
enum { CONSTANT_BITS = 13, KEPT_BITS = 2 };

/* Two constants for `_mm256_madd_epi16`, which adds the products of each two neighbours. */
#define BOTH(a, b) _mm256_set1_epi32((int32_t)((uint32_t)(b) << 16 | ((a) & 0xFFFF)))

/* Transform eight columns or rows, whose values are in pairs: 0 and 4, 1 and 5, 2 and 6, 3 and 7. Round off `shift` bits.
 *
 * The products of jidctint are grouped by the value that is multiplied. So the factors are sums of the constants
 * 0.298631336, 0.390180644, 0.541196100, 0.765366865, 0.899976223, 1.175875602, 1.501321110, 1.847759065, 1.961570560,
 * 2.053119869, 2.562915447 and 3.072711026, each rounded to 13 bits first. The sums are not rounded, so the result is the
 * same number. */
INLINE void transform(const __m256i *pairs, int shift, __m256i *to)
{
    __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    __m256i even0 = _mm256_add_epi32(_mm256_madd_epi16(pairs[0], BOTH(1 << CONSTANT_BITS, 1 << CONSTANT_BITS)), half);
    __m256i even1 = _mm256_add_epi32(_mm256_madd_epi16(pairs[0], BOTH(1 << CONSTANT_BITS, -(1 << CONSTANT_BITS))), half);
    __m256i even2 = _mm256_madd_epi16(pairs[2], BOTH(4433, 4433 - 15137));
    __m256i even3 = _mm256_madd_epi16(pairs[2], BOTH(4433 + 6270, 4433));
    __m256i sums[4] = {
        _mm256_add_epi32(even0, even3),
        _mm256_add_epi32(even1, even2),
        _mm256_sub_epi32(even1, even2),
        _mm256_sub_epi32(even0, even3),
    };
    __m256i odd[4] = {
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[1], BOTH(12299 - 7373 + 9633 - 3196, 9633 - 3196)),
            _mm256_madd_epi16(pairs[3], BOTH(9633, 9633 - 7373))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[1], BOTH(9633, 9633 - 20995)),
            _mm256_madd_epi16(pairs[3], BOTH(25172 - 20995 + 9633 - 16069, 9633 - 16069))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[1], BOTH(9633 - 3196, 16819 - 20995 + 9633 - 3196)),
            _mm256_madd_epi16(pairs[3], BOTH(9633 - 20995, 9633))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[1], BOTH(9633 - 7373, 9633)),
            _mm256_madd_epi16(pairs[3], BOTH(9633 - 16069, 2446 - 7373 + 9633 - 16069))),
    };
    for (int i = 0; i < 4; i++) {
        to[i] = _mm256_srai_epi32(_mm256_add_epi32(sums[i], odd[i]), shift);
        to[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(sums[i], odd[i]), shift);
    }
}

/* Make pairs of columns from eight rows. Each lane of `pairs` is then a row. */
INLINE void transpose(const __m256i *rows, __m256i *pairs)
{
    __m256i a = _mm256_packs_epi32(rows[0], rows[4]), b = _mm256_packs_epi32(rows[1], rows[5]);
    __m256i c = _mm256_packs_epi32(rows[2], rows[6]), d = _mm256_packs_epi32(rows[3], rows[7]);
    __m256i upper[2] = {_mm256_unpacklo_epi16(a, b), _mm256_unpacklo_epi16(c, d)}; /* rows 0 to 3 */
    __m256i lower[2] = {_mm256_unpackhi_epi16(a, b), _mm256_unpackhi_epi16(c, d)};
    /* Columns 0 and 1, followed by 4 and 5; then 2 and 3, followed by 6 and 7. */
    __m256i upper01 = _mm256_unpacklo_epi32(upper[0], upper[1]), upper23 = _mm256_unpackhi_epi32(upper[0], upper[1]);
    __m256i lower01 = _mm256_unpacklo_epi32(lower[0], lower[1]), lower23 = _mm256_unpackhi_epi32(lower[0], lower[1]);
    __m256i columns01 = _mm256_permute2x128_si256(upper01, lower01, 0x20);
    __m256i columns45 = _mm256_permute2x128_si256(upper01, lower01, 0x31);
    __m256i columns23 = _mm256_permute2x128_si256(upper23, lower23, 0x20);
    __m256i columns67 = _mm256_permute2x128_si256(upper23, lower23, 0x31);
    pairs[0] = _mm256_unpacklo_epi16(columns01, columns45);
    pairs[1] = _mm256_unpackhi_epi16(columns01, columns45);
    pairs[2] = _mm256_unpacklo_epi16(columns23, columns67);
    pairs[3] = _mm256_unpackhi_epi16(columns23, columns67);
}

/* The largest sum of magnitudes of a column for which 16 bits hold all intermediate values, here and in libjpeg-turbo's
 * vectors: after the first pass, a value is at most 1.387 * 4 times this sum, and two of these values are added. */
enum { LARGEST_COLUMN = 2900 };

/* Write the 8 x 8 samples of a block. False if its values are larger than those of any image. */
INLINE int write_block(const int16_t *block, const int16_t *quantizer, uint8_t *to, int stride)
{
    __m256i pairs[4], v[8], sums = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        __m256i values = _mm256_load_si256((const __m256i *)block + i);
        __m256i steps = _mm256_loadu_si256((const __m256i *)quantizer + i);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_abs_epi16(values), steps));
        pairs[i] = _mm256_mullo_epi16(values, steps);
    }
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(sums, _mm256_set1_epi32(LARGEST_COLUMN))))
        return 0;
    transform(pairs, CONSTANT_BITS - KEPT_BITS, v);
    transpose(v, pairs);
    transform(pairs, CONSTANT_BITS + KEPT_BITS + 3, v);
    /* `v` has columns of samples, minus 128. */
    __m256i a = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[4]), _mm256_packs_epi32(v[2], v[6]));
    __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(v[1], v[5]), _mm256_packs_epi32(v[3], v[7]));
    __m256i columns01 = _mm256_unpacklo_epi8(a, b), columns23 = _mm256_unpackhi_epi8(a, b); /* followed by 45 and 67 */
    __m256i columns0123 = _mm256_unpacklo_epi16(columns01, columns23);
    __m256i columns4567 = _mm256_unpackhi_epi16(columns01, columns23);
    __m256i middle = _mm256_set1_epi8((char)128);
    __m256i rows0145 = _mm256_xor_si256(_mm256_unpacklo_epi32(columns0123, columns4567), middle);
    __m256i rows2367 = _mm256_xor_si256(_mm256_unpackhi_epi32(columns0123, columns4567), middle);
    for (int half = 0; half < 2; half++, to += 4 * stride) {
        __m128i rows01 = half ? _mm256_extracti128_si256(rows0145, 1) : _mm256_castsi256_si128(rows0145);
        __m128i rows23 = half ? _mm256_extracti128_si256(rows2367, 1) : _mm256_castsi256_si128(rows2367);
        _mm_storel_epi64((__m128i *)to, rows01);
        _mm_storel_epi64((__m128i *)(to + stride), _mm_unpackhi_epi64(rows01, rows01));
        _mm_storel_epi64((__m128i *)(to + 2 * stride), rows23);
        _mm_storel_epi64((__m128i *)(to + 3 * stride), _mm_unpackhi_epi64(rows23, rows23));
    }
    return 1;
}

INLINE int write_flat_block(int dc, int step, uint8_t *to, int stride)
{
    int value = dc * step;
    if (value > LARGEST_COLUMN || value < -LARGEST_COLUMN)
        return 0;
    value = ((value + 4) >> 3) + 128;
    value = value < 0 ? 0 : value > 255 ? 255 : value;
    for (int i = 0; i < 8; i++)
        memset(to + i * stride, value, 8);
    return 1;
}

/* ---- a window ---- */

typedef struct {
    int top, left, bottom, right;
} Area;

/* Decode the samples of the MCUs in an area; `area` counts MCUs. False if the scan is invalid. */
static int read_scan(Image *image, Area area, uint8_t *room)
{
    const Component *c = image->components;
    int mcu_width = 8 * c->horizontal, per_row = (image->width + mcu_width - 1) / mcu_width;
    int predicted[COMPONENTS] = {0}, until_restart = image->restart_interval ? image->restart_interval : -1, restarts = 0;
    _Alignas(32) int16_t blocks[MOST_BLOCKS][BLOCK + 16];
    int ends[MOST_BLOCKS];
    uint8_t *end = room;
    const uint8_t *at = unstuff(image->scan, image->end, &end);
    memset(end, 0, 16);
    Bits bits = {0, 0, room};
    for (int row = 0; row < area.bottom; row++)
        for (int column = 0; column < per_row; column++) {
            if (until_restart == 0) {
                if (image->end - at < 2 || at[0] != 0xFF || at[1] != 0xD0 + restarts % 8)
                    return 0;
                if (bits_left(&bits, end) < 0 || bits_left(&bits, end) > 7) /* a part of a byte may be left */
                    return 0;
                restarts++;
                until_restart = image->restart_interval;
                memset(predicted, 0, sizeof predicted);
                end = room;
                at = unstuff(at + 2, image->end, &end);
                memset(end, 0, 16);
                bits = (Bits){0, 0, room};
            }
            until_restart--;
            int is_wanted = row >= area.top && column >= area.left && column < area.right, read = 0;
            for (int i = 0; i < image->count; i++) {
                const Huffman *dc = image->tables->dc + c[i].dc;
                const HuffmanAC *ac = image->tables->ac + c[i].ac;
                for (int b = 0; b < c[i].horizontal * c[i].vertical; b++) {
                    if (!read_first(dc, &bits, predicted + i))
                        return 0;
                    if (!is_wanted) {
                        if (!pass_others(ac, &bits))
                            return 0;
                        continue;
                    }
                    int16_t *block = blocks[read];
                    memset(block, 0, 128);
                    block[0] = (int16_t)predicted[i];
                    if (!(ends[read++] = read_others(ac, &bits, block)))
                        return 0;
                }
            }
            if (bits_left(&bits, end) < 0)
                return 0;
            if (!is_wanted)
                continue;
            read = 0;
            for (int i = 0; i < image->count; i++)
                for (int y = 0; y < c[i].vertical; y++)
                    for (int x = 0; x < c[i].horizontal; x++, read++) {
                        const int16_t *steps = image->quantizers[c[i].quantizer];
                        uint8_t *to = c[i].plane + 8 * (x + (column - area.left) * c[i].horizontal +
                                                        ((row - area.top) * c[i].vertical + y) * (ptrdiff_t)c[i].stride);
                        if (!(ends[read] == END_OF_BLOCK + 1 ? write_flat_block(blocks[read][0], steps[0], to, c[i].stride)
                                                             : write_block(blocks[read], steps, to, c[i].stride)))
                            return 0;
                    }
        }
    return 1;
}

/* In a build with the address sanitizer the regions of the scratch memory are separated by poisoned gaps, so that an access
 * beyond one of them is reported. SLACK: bytes behind a plane that a vector may read. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { SLACK = 64, GAP = 256 };
static uint8_t *behind_gap(uint8_t *end)
{
    ASAN_POISON_MEMORY_REGION(end, GAP);
    return end + GAP;
}
static void remove_gaps(uint8_t *room, size_t size)
{
    ASAN_UNPOISON_MEMORY_REGION(room, size);
}
#else
enum { SLACK = 0, GAP = 0 };
static uint8_t *behind_gap(uint8_t *end)
{
    return end;
}
static void remove_gaps(uint8_t *room, size_t size)
{
}
#endif

/* The bytes for a row of a component's samples, and some extra. LINES of them are needed: two for chroma, and one for sums,
 * which are half as many with two bytes each. */
enum { LINES = 3 };
static size_t line_size(size_t width)
{
    return (width + 64 + 63) / 64 * 64;
}

INLINE int clamped(int value, int below)
{
    return value < 0 ? 0 : value >= below ? below - 1 : value;
}

/* Return 16 samples as 16-bit numbers. */
INLINE __m256i load_samples(const uint8_t *at)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
}

/* Interpolate two samples next to each of `count` sums, which have one more on each side: each weighs its own sum three times
 * and the neighbour's once. Reads and writes up to 16 sums more. */
INLINE void interpolate(const uint16_t *sums, int count, int left, int right, int shift, uint8_t *to)
{
    for (int i = 0; i < count; i += 16) {
        __m256i middle = _mm256_loadu_si256((const __m256i *)(sums + i + 1));
        __m256i three = _mm256_add_epi16(middle, _mm256_add_epi16(middle, middle));
        __m256i before = _mm256_add_epi16(_mm256_loadu_si256((const __m256i *)(sums + i)), _mm256_set1_epi16(left));
        __m256i after = _mm256_add_epi16(_mm256_loadu_si256((const __m256i *)(sums + i + 2)), _mm256_set1_epi16(right));
        __m256i even = _mm256_srli_epi16(_mm256_add_epi16(three, before), shift);
        __m256i odd = _mm256_srli_epi16(_mm256_add_epi16(three, after), shift);
        _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
    }
}

/* Return the samples of a component for the pixels of a row from `left` to `right`. If there are fewer samples than pixels,
 * they are interpolated in `to`. `sums` has room for one more sample on each side. */
INLINE const uint8_t *samples(
    const Component *c, int horizontal, int vertical, int row, int left, int right, uint16_t *sums, uint8_t *to)
{
    const uint8_t *near = c->plane + (ptrdiff_t)(row / vertical - c->first_row) * c->stride - c->first_column;
    if (horizontal == 1)
        return near + left;
    int from = left / 2, count = (right + 1) / 2 - from;
    int ends[] = {clamped(from - 1, c->width), clamped(from + count, c->width)};
    if (vertical == 2) {
        int beside = clamped(row / 2 + (row & 1 ? 1 : -1), c->height);
        const uint8_t *far = c->plane + (ptrdiff_t)(beside - c->first_row) * c->stride - c->first_column;
        for (int i = 0; i < count; i += 16) {
            __m256i nearer = load_samples(near + from + i), both = _mm256_add_epi16(nearer, load_samples(far + from + i));
            both = _mm256_add_epi16(both, _mm256_add_epi16(nearer, nearer));
            _mm256_storeu_si256((__m256i *)(sums + 1 + i), both);
        }
        sums[0] = 3 * near[ends[0]] + far[ends[0]];
        sums[1 + count] = 3 * near[ends[1]] + far[ends[1]];
        interpolate(sums, count, 8, 7, 4, to);
    } else {
        for (int i = 0; i < count; i += 16)
            _mm256_storeu_si256((__m256i *)(sums + 1 + i), load_samples(near + from + i));
        sums[0] = near[ends[0]];
        sums[1 + count] = near[ends[1]];
        interpolate(sums, count, 1, 2, 2, to);
    }
    return to + (left & 1);
}

/* The positions of the bytes of red, green and blue in each third of 16 pixels. */
#define X 0x80
static const uint8_t THIRDS[3][3][16] = {
    {
        {0, X, X, 1, X, X, 2, X, X, 3, X, X, 4, X, X, 5},
        {X, 0, X, X, 1, X, X, 2, X, X, 3, X, X, 4, X, X},
        {X, X, 0, X, X, 1, X, X, 2, X, X, 3, X, X, 4, X},
    },
    {
        {X, X, 6, X, X, 7, X, X, 8, X, X, 9, X, X, 10, X},
        {5, X, X, 6, X, X, 7, X, X, 8, X, X, 9, X, X, 10},
        {X, 5, X, X, 6, X, X, 7, X, X, 8, X, X, 9, X, X},
    },
    {
        {X, 11, X, X, 12, X, X, 13, X, X, 14, X, X, 15, X, X},
        {X, X, 11, X, X, 12, X, X, 13, X, X, 14, X, X, 15, X},
        {10, X, X, 11, X, X, 12, X, X, 13, X, X, 14, X, X, 15},
    },
};
#undef X

/* How many pixels of a row are written at a time, and how many bytes this may write after the end. */
enum { AT_A_TIME = 16, BEHIND_PIXELS = 3 * (AT_A_TIME - 1) };

/* Convert a row to RGB.
 *
 * The factors of jdcolor are 1.40200, 0.34414, 0.71414 and 1.77200 in 16 bits: 91881, 22554, 46802 and 116130. A factor that
 * is too large for a signed number is split, and the integer part is added: 91881 = 65536 + 26345, and so on. */
INLINE void write_row(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, int width, uint8_t *out)
{
    __m256i middle = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1), half = _mm256_set1_epi32(1 << 15);
    for (int i = 0; i < width; i += AT_A_TIME, out += 3 * AT_A_TIME) {
        __m256i y = load_samples(luma + i);
        __m256i b = _mm256_sub_epi16(load_samples(blue + i), middle);
        __m256i r = _mm256_sub_epi16(load_samples(red + i), middle);
        __m256i b2 = _mm256_add_epi16(b, b), r2 = _mm256_add_epi16(r, r);
        /* Multiply the double, which leaves only the upper 16 bits of the product; then halve with rounding. */
        __m256i to_r = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(r2, _mm256_set1_epi16(26345)), one), 1);
        __m256i to_b = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(b2, _mm256_set1_epi16(-14942)), one), 1);
        __m256i factors = BOTH(-22554, 65536 - 46802);
        __m256i to_g = _mm256_packs_epi32(
            _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(b, r), factors), half), 16),
            _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(b, r), factors), half), 16));
        __m256i colours[3] = {
            _mm256_add_epi16(y, _mm256_add_epi16(r, to_r)),
            _mm256_add_epi16(y, _mm256_sub_epi16(to_g, r)),
            _mm256_add_epi16(y, _mm256_add_epi16(b2, to_b)),
        };
        __m128i bytes[3];
        for (int c = 0; c < 3; c++)
            bytes[c] = _mm_packus_epi16(_mm256_castsi256_si128(colours[c]), _mm256_extracti128_si256(colours[c], 1));
        for (int third = 0; third < 3; third++) {
            __m128i all = _mm_setzero_si128();
            for (int c = 0; c < 3; c++)
                all = _mm_or_si128(all, _mm_shuffle_epi8(bytes[c], _mm_loadu_si128((const __m128i *)THIRDS[third][c])));
            _mm_storeu_si128((__m128i *)(out + 16 * third), all);
        }
    }
}

/* Write the window's pixels as RGB, from the samples. */
static void write_pixels(const Image *image, Area window, uint8_t *lines, uint8_t *out)
{
    const Component *c = image->components;
    int width = window.right - window.left;
    size_t line = line_size(width);
    const uint8_t *grey = lines;
    if (image->count == 1)
        memset(lines, 128, line);
    for (int row = window.top; row < window.bottom; row++, out += 3 * (ptrdiff_t)width) {
        const uint8_t *y = samples(c, 1, 1, row, window.left, window.right, NULL, NULL);
        const uint8_t *chroma[2] = {grey, grey};
        for (int i = 0; i < image->count - 1; i++)
            chroma[i] = samples(
                c + 1 + i, c->horizontal, c->vertical, row, window.left, window.right, (uint16_t *)lines,
                lines + (1 + i) * (line + GAP));
        write_row(y, chroma[0], chroma[1], width, out);
    }
}

/* ---- the module ---- */

/* BEHIND_SCAN: how many bytes reading an MCU may take after the end of the scan: six blocks of 64 values of 27 bits, and the
 * bytes of a refill. LARGEST_SIDE is libjpeg-turbo's limit. With LARGEST_LENGTH, no sum of these overflows. */
enum { BEHIND_SCAN = 2048, LARGEST_MCU = 16, LARGEST_SIDE = 65500, LARGEST_LENGTH = 1 << 30 };

static size_t planes_size(size_t height, size_t width)
{
    /* The window's MCUs, and one more on each side. */
    return 3 * (height + 4 * LARGEST_MCU) * (width + 4 * LARGEST_MCU);
}

/* A larger file is left to libjpeg-turbo. */
static size_t room_size(size_t length, size_t height, size_t width)
{
    if (length > LARGEST_LENGTH)
        length = LARGEST_LENGTH;
    return sizeof(Tables) + GAP + LINES * (line_size(width) + GAP) + planes_size(height, width) + COMPONENTS * (SLACK + GAP) +
           length + BEHIND_SCAN;
}

static Py_ssize_t pixels_size(Py_ssize_t height, Py_ssize_t width)
{
    return 3 * height * width + BEHIND_PIXELS;
}

static int decode(const uint8_t *data, Py_ssize_t length, int height, int width, Area window, uint8_t *room, uint8_t *out)
{
    Image image = {.tables = (Tables *)room};
    if (length > LARGEST_LENGTH || !read_headers(&image, data, length) || image.height != height || image.width != width)
        return 0;
    Component *c = image.components;
    int horizontal = c->horizontal, vertical = c->vertical;
    /* For narrower images, libjpeg repeats the chroma's columns; they are left to it. */
    if (width < 2 * LARGEST_MCU)
        return 0;
    int mcu_width = 8 * horizontal, mcu_height = 8 * vertical;
    /* The chroma sample next to the window influences the window's edge. */
    Area area = {
        window.top > vertical ? (window.top - vertical) / mcu_height : 0,
        window.left > horizontal ? (window.left - horizontal) / mcu_width : 0,
        (window.bottom + vertical < height ? window.bottom + vertical : height) + mcu_height - 1,
        (window.right + horizontal < width ? window.right + horizontal : width) + mcu_width - 1,
    };
    area.bottom /= mcu_height;
    area.right /= mcu_width;
    size_t line = line_size(window.right - window.left);
    uint8_t *lines = behind_gap(room + sizeof(Tables)), *plane = lines;
    for (int i = 0; i < LINES; i++)
        plane = behind_gap(plane + line);
    for (int i = 0; i < image.count; i++) {
        c[i].height = (height * c[i].vertical + vertical - 1) / vertical;
        c[i].width = (width * c[i].horizontal + horizontal - 1) / horizontal;
        c[i].stride = (area.right - area.left) * c[i].horizontal * 8;
        c[i].first_row = area.top * c[i].vertical * 8;
        c[i].first_column = area.left * c[i].horizontal * 8;
        c[i].plane = plane;
        plane = behind_gap(plane + (size_t)c[i].stride * (area.bottom - area.top) * c[i].vertical * 8 + SLACK);
    }
    if (!read_scan(&image, area, plane))
        return 0;
    write_pixels(&image, window, lines, out);
    return 1;
}

#pragma GCC pop_options

static PyObject *py_sizes(PyObject *self, PyObject *args)
{
    Py_ssize_t length;
    int height, width;
    if (!PyArg_ParseTuple(args, "nii", &length, &height, &width))
        return NULL;
    if (length < 0 || height < 1 || width < 1 || height > LARGEST_SIDE || width > LARGEST_SIDE)
        return PyErr_Format(PyExc_ValueError, "no window has %d x %d pixels, or no file %zd bytes", width, height, length);
    return Py_BuildValue("nn", (Py_ssize_t)room_size(length, height, width), pixels_size(height, width));
}

static PyObject *py_decode_window(PyObject *self, PyObject *args)
{
    Py_buffer data, room, out;
    int height, width, top, left, rows, columns;
    if (!PyArg_ParseTuple(
            args, "y*(ii)(iiii)w*w*", &data, &height, &width, &top, &left, &rows, &columns, &room, &out))
        return NULL;
    int is_decoded = -1;
    if (top < 0 || left < 0 || rows < 1 || columns < 1 || height > LARGEST_SIDE || width > LARGEST_SIDE ||
        rows > height - top || columns > width - left) {
        PyErr_Format(
            PyExc_ValueError,
            "the window of %d x %d pixels from row %d and column %d is not within an image of %d x %d pixels",
            columns, rows, top, left, width, height);
    } else if (out.len < pixels_size(rows, columns) || room.len < (Py_ssize_t)room_size(data.len, rows, columns)) {
        PyErr_Format(
            PyExc_ValueError, "a buffer is too small: `out` has %zd bytes of %zd, `room` %zd of %zd", out.len,
            pixels_size(rows, columns), room.len, (Py_ssize_t)room_size(data.len, rows, columns));
    } else {
        Area window = {top, left, top + rows, left + columns};
        Py_BEGIN_ALLOW_THREADS;
        is_decoded = decode(data.buf, data.len, height, width, window, room.buf, out.buf);
        remove_gaps(room.buf, room.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&room);
    PyBuffer_Release(&out);
    return is_decoded < 0 ? NULL : PyBool_FromLong(is_decoded);
}

static PyMethodDef METHODS[] = {
    {"sizes", py_sizes, METH_VARARGS, "sizes(length, height, width): bytes of `room` and `out` for `decode_window`."},
    {"decode_window", py_decode_window, METH_VARARGS,
     "decode_window(data, size, window, room, out): write a window's RGB to `out`; False leaves it to libjpeg-turbo.\n"
     "`room` is one thread's, of zeros at first, and begins at a multiple of 8."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_jpeg", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    if (!__builtin_cpu_supports("x86-64-v3")) {
        PyErr_SetString(PyExc_ImportError, "lockstep.data.decoding._jpeg is for processors with AVX2 (x86-64-v3)");
        return NULL;
    }
    return PyModule_Create(&MODULE);
}

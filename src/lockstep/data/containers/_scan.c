/* Listing the images of TFRecord files and of tars, and framing records, without Python's work and lock for each.
 *
 * What is as it usually is, is answered: whole records with right checksums, and messages as NVIDIA's and TensorFlow's scripts
 * write them; members of tars with plain headers, in the way of WebDataset. At the first that is otherwise, damaged ones among
 * them, the answer ends: the modules in Python look at it, with the libraries of the formats. Records are framed whatever they
 * hold.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <nmmintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("sse4.2")

enum { TEXTS = 3 };

/* A piece of memory. */
typedef struct {
    const uint8_t *data;
    size_t length;
} Span;

/* An image, and where the texts about it begin and end among those of all. */
typedef struct {
    long long offset, length, label;
    size_t texts[TEXTS + 1];
} Image;

/* What was found up to an offset. */
typedef struct {
    Image *images;
    uint8_t *texts, *memory;
    size_t texts_size, memory_size;
    Py_ssize_t count, most;
    long long offset;
} Listing;

static int has_room(uint8_t **memory, size_t *size, size_t needed)
{
    if (needed > *size) {
        uint8_t *larger = realloc(*memory, 2 * needed);
        if (!larger)
            return 0;
        *memory = larger;
        *size = 2 * needed;
    }
    return 1;
}

static int read_all(int file, uint8_t *to, size_t length, long long offset)
{
    while (length) {
        ssize_t count = pread(file, to, length, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return 0;
        to += count;
        offset += count;
        length -= (size_t)count;
    }
    return 1;
}

/* Add an image; 0 if there is no room for its texts. */
static int add(Listing *found, long long offset, long long length, long long label, const Span *texts)
{
    Image *image = found->images + found->count;
    size_t end = found->count ? image[-1].texts[TEXTS] : 0;
    *image = (Image){offset, length, label, {end}};
    for (int i = 0; i < TEXTS; i++) {
        if (!has_room(&found->texts, &found->texts_size, end + texts[i].length + 1))
            return 0;
        memcpy(found->texts + end, texts[i].data, texts[i].length);
        image->texts[i + 1] = end += texts[i].length;
    }
    found->count++;
    return 1;
}

static int equal(Span a, Span b)
{
    return a.length == b.length && memcmp(a.data, b.data, a.length) == 0;
}

/* TFRecord. */

enum { FRONT = 12, CRC = 4, LANE = 1024, MOST_SETS = 4, PIECES = 3 };

/* Under which keys a writer keeps what. */
typedef struct {
    Span image, label, name, class_name;
    long long first_label;
} Keys;

/* CRC-32C of three parts of data at once: the processor begins one step while it has not ended others. `SHIFT` has, for each
 * byte of a register, what becomes of it when LANE bytes of zeros follow. */
static uint32_t SHIFT[4][256];

static void make_shift(void)
{
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        uint64_t crc = (uint32_t)1 << bit;
        for (int i = 0; i < LANE / 8; i++)
            crc = _mm_crc32_u64(crc, 0);
        of_bit[bit] = (uint32_t)crc;
    }
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            SHIFT[byte][value] = 0;
            for (int bit = 0; bit < 8; bit++)
                SHIFT[byte][value] ^= value >> bit & 1 ? of_bit[8 * byte + bit] : 0;
        }
}

static uint64_t shifted(uint64_t crc)
{
    return SHIFT[0][crc & 255] ^ SHIFT[1][crc >> 8 & 255] ^ SHIFT[2][crc >> 16 & 255] ^ SHIFT[3][crc >> 24 & 255];
}

static uint64_t word_at(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* Return the register behind data; it begins with all bits set, and inverted it is the checksum. */
static uint64_t crc_behind(uint64_t crc, const uint8_t *data, size_t length)
{
    for (; length >= 3 * LANE; data += 3 * LANE, length -= 3 * LANE) {
        uint64_t second = 0, third = 0;
        for (int i = 0; i < LANE; i += 8) {
            crc = _mm_crc32_u64(crc, word_at(data + i));
            second = _mm_crc32_u64(second, word_at(data + LANE + i));
            third = _mm_crc32_u64(third, word_at(data + 2 * LANE + i));
        }
        crc = shifted(shifted(crc) ^ second) ^ third;
    }
    for (; length >= 8; data += 8, length -= 8)
        crc = _mm_crc32_u64(crc, word_at(data));
    for (; length; data++, length--)
        crc = _mm_crc32_u8((uint32_t)crc, *data);
    return crc;
}

static uint32_t masked(uint64_t crc)
{
    uint32_t whole = (uint32_t)crc ^ 0xFFFFFFFF;
    return (whole >> 15 | whole << 17) + 0xA282EAD8;
}

static uint32_t masked_crc(const uint8_t *data, size_t length)
{
    return masked(crc_behind(0xFFFFFFFF, data, length));
}

static uint32_t crc_at(const uint8_t *data)
{
    uint32_t crc;
    memcpy(&crc, data, sizeof crc);
    return crc;
}

/* Read a number of a message; 0 if it does not end. */
static int read_varint(Span *from, uint64_t *number)
{
    *number = 0;
    for (int shift = 0; shift < 64 && from->length; shift += 7) {
        uint8_t byte = *from->data++;
        from->length--;
        *number |= (uint64_t)(byte & 127) << shift;
        if (byte < 128)
            return shift < 63 || byte < 2;
    }
    return 0;
}

/* Take a field that has a length off the front of a message; 0 if another stands there. */
static int take(Span *from, int field, Span *content)
{
    uint64_t tag, length;
    if (!read_varint(from, &tag) || tag != (uint64_t)(field << 3 | 2) || !read_varint(from, &length) || length > from->length)
        return 0;
    *content = (Span){from->data, (size_t)length};
    from->data += length;
    from->length -= (size_t)length;
    return 1;
}

/* Take the only field of a message. */
static int take_all(Span from, int field, Span *content)
{
    return take(&from, field, content) && from.length == 0;
}

/* Tell whether a span is what was looked for, for the first time: twice the same key is left to the library. */
static int is_found(Span key, Span wanted, Span value, Span *found, int *is_sound)
{
    if (!wanted.length || !equal(key, wanted))
        return 0;
    *is_sound &= found->data == NULL;
    *found = value;
    return 1;
}

/* Tell whether a value is one that the library would read: a list of texts, or of numbers behind one length, or empty. */
static int is_feature(Span feature)
{
    Span list, content;
    uint64_t number;
    if (take_all(feature, 1, &list)) {
        while (list.length)
            if (!take(&list, 1, &content))
                return 0;
        return 1;
    }
    if (take_all(feature, 2, &list))
        return !list.length || (take_all(list, 1, &content) && content.length % 4 == 0);
    if (!take_all(feature, 3, &list))
        return 0;
    if (!list.length)
        return 1;
    if (!take_all(list, 1, &content))
        return 0;
    while (content.length)
        if (!read_varint(&content, &number))
            return 0;
    return 1;
}

/* Return the only text of a feature, of length 0 if there is no feature. */
static int text_of(Span feature, Span *text)
{
    Span list;
    *text = (Span){(const uint8_t *)"", 0};
    return feature.data == NULL || (take_all(feature, 1, &list) && take_all(list, 1, text));
}

static int number_of(Span feature, long long *number)
{
    Span list, packed;
    uint64_t value;
    if (!take_all(feature, 3, &list) || !take_all(list, 1, &packed) || !read_varint(&packed, &value) || packed.length)
        return 0;
    *number = (long long)value;
    return 1;
}

/* Find what a message of an image holds; 0 leaves it to the library. */
static int read_message(Span message, const Keys *sets, int count, Span *image, long long *label, Span *name, Span *class_name)
{
    Span features, entry, key, value, found[MOST_SETS][4];
    memset(found, 0, sizeof found);
    if (!take_all(message, 1, &features))
        return 0;
    while (features.length) {
        int is_sound = take(&features, 1, &entry) && take(&entry, 1, &key) && take_all(entry, 2, &value) && is_feature(value);
        for (size_t i = 0; is_sound && i < key.length; i++)
            is_sound = key.data[i] < 128;
        for (int i = 0; is_sound && i < count; i++) {
            const Keys *keys = sets + i;
            (void)(is_found(key, keys->image, value, &found[i][0], &is_sound) ||
                   is_found(key, keys->label, value, &found[i][1], &is_sound) ||
                   is_found(key, keys->name, value, &found[i][2], &is_sound) ||
                   is_found(key, keys->class_name, value, &found[i][3], &is_sound));
        }
        if (!is_sound)
            return 0;
    }
    for (int i = 0; i < count; i++)
        if (found[i][0].data && found[i][1].data) {
            if (!text_of(found[i][0], image) || !image->length || !number_of(found[i][1], label))
                return 0;
            if (*label < sets[i].first_label)
                return 0;
            *label -= sets[i].first_label;
            return text_of(found[i][2], name) && text_of(found[i][3], class_name);
        }
    return 0;
}

/* List records from an offset to an end, as many as there is room for, up to the first that is not as usual. */
static void list_records(int file, long long size, long long end, const Keys *sets, int count, Listing *found)
{
    uint8_t front[FRONT];
    while (found->count < found->most && found->offset < end && size - found->offset >= FRONT + CRC) {
        if (!read_all(file, front, FRONT, found->offset) || masked_crc(front, 8) != crc_at(front + 8))
            return;
        uint64_t length = word_at(front);
        if (length > (uint64_t)(size - found->offset - FRONT - CRC))
            return;
        if (!has_room(&found->memory, &found->memory_size, length + CRC) ||
            !read_all(file, found->memory, length + CRC, found->offset + FRONT) ||
            masked_crc(found->memory, length) != crc_at(found->memory + length))
            return;
        Span image, texts[TEXTS] = {[2] = {(const uint8_t *)"", 0}};
        long long label;
        if (!read_message((Span){found->memory, length}, sets, count, &image, &label, &texts[0], &texts[1]) ||
            !add(found, found->offset + FRONT + (image.data - found->memory), (long long)image.length, label, texts))
            return;
        found->offset += FRONT + (long long)length + CRC;
    }
}

/* A payload, and what stands before and behind it. */
typedef struct {
    Py_buffer pieces[PIECES];
    uint8_t front[FRONT], back[CRC];
} Record;

static void frame(Record *record)
{
    uint64_t length = 0, crc = 0xFFFFFFFF;
    for (int i = 0; i < PIECES; i++) {
        length += (uint64_t)record->pieces[i].len;
        crc = crc_behind(crc, record->pieces[i].buf, (size_t)record->pieces[i].len);
    }
    uint32_t of_length = masked_crc((const uint8_t *)&length, sizeof length), of_payload = masked(crc);
    memcpy(record->front, &length, sizeof length);
    memcpy(record->front + sizeof length, &of_length, CRC);
    memcpy(record->back, &of_payload, CRC);
}

/* Tar. */

enum { BLOCK = 512, WINDOW = 8 * BLOCK, NAME = 100, MOST_CLASS = 64, MOST_JSON = 1 << 20 };
enum { SIZE = 124, SUM = 148, TYPE = 156, MAGIC = 257, PREFIX = 345 };

/* A file's bytes near to each other, read at once. */
typedef struct {
    int file;
    long long size, begin;
    size_t length;
    uint8_t data[WINDOW];
} Window;

/* The image of a sample, what is said about it, and the key that its members share. */
typedef struct {
    long long offset, length;
    size_t key, class_length, json_length;
    int has_image, has_class, has_json;
    char name[NAME];
    uint8_t class_text[MOST_CLASS];
} Sample;

static const uint8_t *near(Window *window, long long offset, size_t length)
{
    if (offset < window->begin || offset + (long long)length > window->begin + (long long)window->length) {
        long long rest = window->size - offset;
        window->begin = offset;
        window->length = rest < WINDOW ? (size_t)rest : WINDOW;
        if (rest < (long long)length || !read_all(window->file, window->data, window->length, offset)) {
            window->length = 0;
            return NULL;
        }
    }
    return window->data + (offset - window->begin);
}

/* Read a number of a header: octal digits, then zeros or spaces. */
static int read_octal(const uint8_t *field, int length, long long *number)
{
    int i = 0;
    for (*number = 0; i < length && field[i] >= '0' && field[i] <= '7'; i++)
        *number = *number << 3 | (field[i] - '0');
    while (i < length && (field[i] == 0 || field[i] == ' '))
        i++;
    return i == length;
}

/* Tell whether a header is that of a file or a folder, plain in all that the library would look at. */
static int is_plain(const uint8_t *header, long long *length)
{
    static const int numbers[][2] = {{100, 8}, {108, 8}, {116, 8}, {136, 12}, {329, 8}, {337, 8}};
    long long number, sum = 8 * ' ';
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!read_octal(header + numbers[i][0], numbers[i][1], &number))
            return 0;
    for (int i = 0; i < BLOCK; i++)
        sum += i < SUM || i >= SUM + 8 ? header[i] : 0;
    for (int i = 0; i < NAME && header[i]; i++)
        if (header[i] < ' ' || header[i] > '~')
            return 0;
    return read_octal(header + SIZE, 12, length) && read_octal(header + SUM, 8, &number) && number == sum &&
           memcmp(header + MAGIC, "ustar", 5) == 0 && header[PREFIX] == 0 && header[NAME - 1] == 0 &&
           (header[TYPE] == '0' || (header[TYPE] == '5' && *length == 0));
}

/* Return the length of the key in a name: up to the first dot behind the last stroke; 0 if it has none. */
static size_t key_of(const char *name)
{
    const char *last = strrchr(name, '/'), *base = last ? last + 1 : name, *dot = strchr(base, '.');
    return dot && dot != base ? (size_t)(dot - name) : 0;
}

static int is_one_of(const char *kind, const char *const *kinds)
{
    for (; *kinds; kinds++)
        if (strcasecmp(kind, *kinds) == 0)
            return 1;
    return 0;
}

static int add_sample(Listing *found, const Sample *sample)
{
    Span texts[TEXTS] = {
        {(const uint8_t *)sample->name, strlen(sample->name)},
        {sample->class_text, sample->class_length},
        {found->memory ? found->memory : (const uint8_t *)"", sample->json_length},
    };
    return sample->has_image && add(found, sample->offset, sample->length, sample->has_class | sample->has_json << 1, texts);
}

/* Take a member into a sample; 0 if it is not as usual. */
static int take_member(Sample *sample, const char *name, size_t key, long long offset, long long length, Window *window, Listing *found)
{
    static const char *const IMAGES[] = {"jpg", "jpeg", "png", "bmp", "gif", "ppm", "tif", "tiff", "webp", NULL};
    static const char *const ABOUT[] = {"cls", "json", NULL};
    const char *kind = name + key + 1;
    if (is_one_of(kind, IMAGES)) {
        memcpy(sample->name, name, NAME);
        sample->offset = offset;
        sample->length = length;
        return !sample->has_image++;
    }
    if (strcmp(kind, "cls") == 0) {
        const uint8_t *text = length <= MOST_CLASS ? near(window, offset, (size_t)length) : NULL;
        if (text)
            memcpy(sample->class_text, text, sample->class_length = (size_t)length);
        return text && !sample->has_class++;
    }
    if (strcmp(kind, "json") == 0)
        return length <= MOST_JSON && has_room(&found->memory, &found->memory_size, (size_t)length + 1) &&
               read_all(window->file, found->memory, sample->json_length = (size_t)length, offset) && !sample->has_json++;
    return !is_one_of(kind, ABOUT); /* in capitals */
}

/* List samples from the offset on, as many as there is room for, up to the first with what is not as usual or not known to be
 * its end: the offset is its first member's then. */
static void list_samples(int file, long long size, Listing *found)
{
    Window window = {.file = file, .size = size};
    Sample sample = {0};
    long long at = found->offset, before = at, length;
    Py_ssize_t known = 0; /* samples behind which a member stands that another follows */
    const uint8_t *header;
    while ((header = near(&window, at, BLOCK)) && is_plain(header, &length) && length <= size - at - BLOCK) {
        const char *name = (const char *)header;
        size_t key = header[TYPE] == '0' ? key_of(name) : 0;
        known = found->count;
        if (known == found->most)
            break;
        if (key && (key != sample.key || memcmp(name, sample.name, key))) {
            if (sample.key) {
                if (!add_sample(found, &sample))
                    break;
                before = found->offset;
                found->offset = at;
            }
            sample = (Sample){.key = key};
            memcpy(sample.name, name, NAME);
        }
        if (key && !take_member(&sample, name, key, at + BLOCK, length, &window, found))
            break;
        at += BLOCK + (length + BLOCK - 1) / BLOCK * BLOCK;
    }
    if (known < found->count) {
        found->count = known;
        found->offset = before;
    }
}

#pragma GCC pop_options

static Span span_of(PyObject *bytes)
{
    char *data;
    Py_ssize_t length;
    PyBytes_AsStringAndSize(bytes, &data, &length);
    return (Span){(const uint8_t *)data, (size_t)length};
}

static int make(Listing *found)
{
    if (found->most < 1 || found->most > 1 << 20 || found->offset < 0) {
        PyErr_Format(PyExc_ValueError, "%zd images from byte %lld on", found->most, found->offset);
        return 0;
    }
    found->images = malloc((size_t)found->most * sizeof(Image));
    if (!found->images)
        PyErr_NoMemory();
    return found->images != NULL;
}

/* Return offset, length, number and texts of every image, and the offset up to which was listed; free the memory. */
static PyObject *answer(Listing *found)
{
    PyObject *images = PyList_New(found->count);
    for (Py_ssize_t i = 0; images && i < found->count; i++) {
        const Image *image = found->images + i;
        const char *texts[TEXTS];
        Py_ssize_t lengths[TEXTS];
        for (int j = 0; j < TEXTS; j++) {
            texts[j] = (const char *)found->texts + image->texts[j];
            lengths[j] = (Py_ssize_t)(image->texts[j + 1] - image->texts[j]);
        }
        PyObject *item = Py_BuildValue(
            "LLLy#y#y#", image->offset, image->length, image->label, texts[0], lengths[0], texts[1], lengths[1], texts[2],
            lengths[2]);
        if (!item || PyList_SetItem(images, i, item) < 0)
            Py_CLEAR(images);
    }
    free(found->images);
    free(found->memory);
    free(found->texts);
    return images ? Py_BuildValue("NL", images, found->offset) : NULL;
}

static PyObject *py_records(PyObject *self, PyObject *args)
{
    PyObject *keys, *image, *label, *name, *class_name;
    int file;
    long long size, end;
    Listing found = {0};
    Keys sets[MOST_SETS];
    if (!PyArg_ParseTuple(args, "iLLLnO!", &file, &size, &found.offset, &end, &found.most, &PyTuple_Type, &keys))
        return NULL;
    Py_ssize_t count = PyTuple_Size(keys);
    if (count > MOST_SETS)
        return PyErr_Format(PyExc_ValueError, "%zd sets of keys; there is room for %d", count, MOST_SETS);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyArg_ParseTuple(PyTuple_GetItem(keys, i), "SSSSL", &image, &label, &name, &class_name, &sets[i].first_label))
            return NULL;
        sets[i].image = span_of(image);
        sets[i].label = span_of(label);
        sets[i].name = span_of(name);
        sets[i].class_name = span_of(class_name);
    }
    if (!make(&found))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    list_records(file, size, end, sets, (int)count, &found);
    Py_END_ALLOW_THREADS;
    return answer(&found);
}

static PyObject *py_samples(PyObject *self, PyObject *args)
{
    int file;
    long long size;
    Listing found = {0};
    if (!PyArg_ParseTuple(args, "iLLn", &file, &size, &found.offset, &found.most) || !make(&found))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    list_samples(file, size, &found);
    Py_END_ALLOW_THREADS;
    return answer(&found);
}

static PyObject *py_frames(PyObject *self, PyObject *payloads)
{
    if (!PyList_Check(payloads))
        return PyErr_Format(PyExc_TypeError, "expected a list of payloads");
    Py_ssize_t count = PyList_Size(payloads), known = 0;
    Record *records = calloc((size_t)count + 1, sizeof(Record));
    PyObject *frames = records ? PyList_New(count) : PyErr_NoMemory();
    for (; frames && known < count; known++) {
        Py_buffer *pieces = records[known].pieces;
        PyObject *payload = PyList_GetItem(payloads, known);
        if (!payload || !PyTuple_Check(payload) || !PyArg_ParseTuple(payload, "y*y*y*", pieces, pieces + 1, pieces + 2)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a payload is a tuple of three pieces");
            Py_CLEAR(frames);
            break;
        }
    }
    if (frames) {
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count; i++)
            frame(records + i);
        Py_END_ALLOW_THREADS;
    }
    for (Py_ssize_t i = 0; frames && i < count; i++) {
        PyObject *item = Py_BuildValue("y#y#", records[i].front, (Py_ssize_t)FRONT, records[i].back, (Py_ssize_t)CRC);
        if (!item || PyList_SetItem(frames, i, item) < 0)
            Py_CLEAR(frames);
    }
    for (Py_ssize_t i = 0; i < known; i++)
        for (int j = 0; j < PIECES; j++)
            PyBuffer_Release(records[i].pieces + j);
    free(records);
    return frames;
}

static PyMethodDef METHODS[] = {
    {"records", py_records, METH_VARARGS,
     "records(descriptor, size, begin, end, most, keys): images of a TFRecord file, and where their records end.\n"
     "Of each: offset, length, label, name, name of the class, and nothing. `keys` has for each kind of writer the keys of\n"
     "image, label, name and name of the class, and the number of the first class."},
    {"samples", py_samples, METH_VARARGS,
     "samples(descriptor, size, begin, most): images of a tar, and where the samples end.\n"
     "Of each: offset, length, 1 if it has a class plus 2 if it has JSON, name, class and JSON."},
    {"frames", py_frames, METH_O, "frames(payloads): what stands before and behind each in a TFRecord file.\n"
     "`payloads` is a list, of each payload three pieces."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_scan", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void)
{
    if (!__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "lockstep.data.containers._scan is for processors with SSE 4.2");
        return NULL;
    }
    make_shift();
    return PyModule_Create(&MODULE);
}

/* allocator.py, addresses.py and usage.py's loop in C, for speed: the same decisions in the same order, tested against them
 * (tests/estimator/test_compiled.py). `make core` compiles it to allocator.wasm, which compiled.py runs.
 *
 * One `State` is one run: everything that decides what comes next lies in it, so that a run parts by copying it.
 */

typedef unsigned char u8;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

#define EXPORT(name) __attribute__((export_name(#name)))
#define MiB (1ll << 20)
#define MINIMUM 512
#define SMALL MiB
#define SMALL_SEGMENT (2 * MiB)
#define LARGE_SEGMENT (20 * MiB)
#define OWN_SEGMENT (10 * MiB)
#define PAGE (2 * MiB)
#define CHUNK (32 * MiB)
#define TOP (1ll << 46)
#define UNLIMITED (1ll << 62)
#define KEYS 6 /* 2 × stream, and one more for small blocks */
#define NONE (-1)

enum { DONE, FAILED, PARTING, FULL };

typedef struct {
    i64 size, address, segment;
    i32 before, after, key, free;
} Block;

typedef struct {
    i64 size, address;
    i32 block, pad;
} Entry;

typedef struct {
    i64 address, size;
} Hole;

typedef struct {
    i64 reserved, allocated, most, lowest, highest, needed, noted;
    i32 retries, flushed, flushes, n_free_slots, n_blocks, n_holes, n_chunks, full;
    i32 n_pool[KEYS];
    /* Of the arrays, all in the same memory; `room` entries each. */
    i32 room, n_numbers;
    Block *blocks;
    i32 *slots;
    Entry *pools[KEYS];
    Hole *holes;
    i64 *starts, *ends;
    i32 *live;
    i64 *sizes;
} State;

static const Hole AT_START[3] = {{TOP - 430 * MiB, 6 * MiB}, {TOP - 416 * MiB, 416 * MiB}, {TOP + 76 * MiB, 20 * MiB}};

static void move(void *to, const void *from, u64 bytes) { __builtin_memmove(to, from, bytes); }

/* --- addresses.py */

static i32 hole_at(const State *s, i64 address) {
    i32 low = 0, high = s->n_holes;
    while (low < high) {
        i32 middle = (low + high) / 2;
        if (s->holes[middle].address < address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void drop_hole(State *s, i32 at) {
    move(s->holes + at, s->holes + at + 1, sizeof(Hole) * (u64)(--s->n_holes - at));
}

static void add_hole(State *s, i64 address, i64 size) {
    if (s->n_holes == s->room) {
        s->full = 1;
        return;
    }
    i32 at = hole_at(s, address);
    move(s->holes + at + 1, s->holes + at, sizeof(Hole) * (u64)(s->n_holes++ - at));
    s->holes[at] = (Hole){address, size};
}

static i32 chunk_after(const State *s, i64 address) { /* bisect_right */
    i32 low = 0, high = s->n_chunks;
    while (low < high) {
        i32 middle = (low + high) / 2;
        if (s->starts[middle] <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void map_chunk(State *s, i64 size) {
    i64 above = AT_START[0].address;
    i32 at = s->n_chunks;
    while (at > 0 && above - s->ends[at - 1] < size) above = s->starts[--at];
    if (s->n_chunks == s->room) {
        s->full = 1;
        return;
    }
    move(s->starts + at + 1, s->starts + at, sizeof(i64) * (u64)(s->n_chunks - at));
    move(s->ends + at + 1, s->ends + at, sizeof(i64) * (u64)(s->n_chunks++ - at));
    s->starts[at] = above - size;
    s->ends[at] = above;
    add_hole(s, above - size, size);
}

static i64 take(State *s, i64 size) {
    for (;;) {
        i32 best = NONE;
        for (i32 i = 0; i < s->n_holes; i++)
            if (s->holes[i].size >= size && (best == NONE || s->holes[i].size < s->holes[best].size)) best = i;
        if (best == NONE) {
            map_chunk(s, (size + CHUNK - 1) / CHUNK * CHUNK);
            if (s->full) return 0;
            continue;
        }
        Hole *hole = s->holes + best;
        i64 address = hole->address + hole->size - size;
        if (hole->size == size) drop_hole(s, best);
        else hole->size -= size;
        return address;
    }
}

static void give(State *s, i64 address, i64 size) {
    i64 start = 0, end = 0;
    i32 chunk = NONE;
    if (address >= AT_START[0].address) {
        for (i32 i = 0; i < 3; i++)
            if (AT_START[i].address <= address) start = AT_START[i].address, end = start + AT_START[i].size;
    } else {
        chunk = chunk_after(s, address) - 1;
        start = s->starts[chunk], end = s->ends[chunk];
    }
    i32 at = hole_at(s, address);
    if (at < s->n_holes && s->holes[at].address == address + size && address + size < end) {
        size += s->holes[at].size;
        drop_hole(s, at);
    }
    if (at && address > start && s->holes[at - 1].address + s->holes[at - 1].size == address) {
        address = s->holes[at - 1].address;
        size += s->holes[at - 1].size;
        drop_hole(s, at - 1);
    }
    if (chunk != NONE && address == start && address + size == end) {
        s->n_chunks--;
        move(s->starts + chunk, s->starts + chunk + 1, sizeof(i64) * (u64)(s->n_chunks - chunk));
        move(s->ends + chunk, s->ends + chunk + 1, sizeof(i64) * (u64)(s->n_chunks - chunk));
    } else {
        add_hole(s, address, size);
    }
}

/* --- allocator.py */

static i32 position(const State *s, i32 key, i64 size, i64 address) { /* bisect_left of (size, address) */
    const Entry *pool = s->pools[key];
    i32 low = 0, high = s->n_pool[key];
    while (low < high) {
        i32 middle = (low + high) / 2;
        if (pool[middle].size < size || (pool[middle].size == size && pool[middle].address < address)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void drop(State *s, i32 key, i32 at) {
    Entry *pool = s->pools[key];
    move(pool + at, pool + at + 1, sizeof(Entry) * (u64)(--s->n_pool[key] - at));
}

static void put(State *s, i32 key, i64 size, i64 address, i32 block) {
    if (s->n_pool[key] == s->room) {
        s->full = 1;
        return;
    }
    Entry *pool = s->pools[key];
    i32 at = position(s, key, size, address);
    move(pool + at + 1, pool + at, sizeof(Entry) * (u64)(s->n_pool[key]++ - at));
    pool[at] = (Entry){size, address, block, 0};
}

static i32 block_slot(State *s) {
    if (s->n_free_slots) return s->slots[--s->n_free_slots];
    if (s->n_blocks == s->room) {
        s->full = 1;
        return 0;
    }
    return s->n_blocks++;
}

static void forget(State *s, i32 block) { s->slots[s->n_free_slots++] = block; }

static i64 kept(const State *s, i64 have, i64 size) {
    int worth = size <= SMALL ? have - size >= MINIMUM : have - size > SMALL && size < s->most;
    return worth ? size : have;
}

static i64 device_request(i64 size) {
    if (size <= SMALL) return SMALL_SEGMENT;
    return size < OWN_SEGMENT ? LARGE_SEGMENT : (size + PAGE - 1) / PAGE * PAGE;
}

static int whole(const State *s, i32 block) { return s->blocks[block].before == NONE && s->blocks[block].after == NONE; }

static void give_back(State *s, i32 block) {
    s->reserved -= s->blocks[block].segment;
    give(s, s->blocks[block].address, s->blocks[block].segment);
    forget(s, block);
}

static void release(State *s) {
    for (i32 small = 0; small < 2; small++)
        for (i32 key = small; key < KEYS; key += 2) {
            Entry *pool = s->pools[key];
            i32 left = 0;
            for (i32 i = 0; i < s->n_pool[key]; i++) {
                if (whole(s, pool[i].block)) give_back(s, pool[i].block);
                else pool[left++] = pool[i];
            }
            s->n_pool[key] = left;
        }
}

static int release_large(State *s, i64 size, i32 key) {
    i64 needed = size > s->most ? size : s->most, released = 0;
    i32 at = position(s, key, needed, -1);
    if (at < s->n_pool[key]) {
        i32 block = s->pools[key][at].block;
        drop(s, key, at);
        give_back(s, block);
        return 1;
    }
    while (s->n_pool[key] && released < needed && s->pools[key][s->n_pool[key] - 1].size >= s->most) {
        Entry last = s->pools[key][--s->n_pool[key]];
        released += last.size;
        give_back(s, last.block);
    }
    return released >= needed;
}

/* 0: within the limits, 1: beyond them, PARTING: beyond some. */
static int beyond(State *s, i64 wanted) {
    i64 needed = s->reserved + wanted;
    if (needed <= s->lowest) return 0;
    if (needed > s->highest) return 1;
    s->needed = needed;
    return PARTING;
}

static int room(State *s, i64 wanted, i64 size, i32 key) {
    int over = beyond(s, wanted);
    if (over == PARTING) return PARTING;
    if (over) {
        if (s->most != UNLIMITED && release_large(s, size, key)) {
            over = beyond(s, wanted);
            if (over == PARTING) return PARTING;
            if (!over) return DONE;
        }
        if (!s->flushed) {
            release(s);
            s->retries++;
            s->flushed = 1;
        }
        over = beyond(s, wanted);
        if (over == PARTING) return PARTING;
        if (over) return FAILED;
    }
    s->flushed = 0;
    return DONE;
}

static int allocate(State *s, i64 size, i32 stream, i32 *made) {
    i32 key = stream * 2 + (size <= SMALL), block;
    Entry *pool = s->pools[key];
    i32 at = position(s, key, size, -1);
    if (at < s->n_pool[key] && (pool[at].size < s->most || (size >= s->most && pool[at].size < size + LARGE_SEGMENT))) {
        block = pool[at].block;
        drop(s, key, at);
    } else {
        i64 wanted = device_request(size);
        int got = room(s, wanted, size, key);
        if (got != DONE) return got;
        s->reserved += wanted;
        block = block_slot(s);
        s->blocks[block] = (Block){wanted, take(s, wanted), wanted, NONE, NONE, key, 1};
    }
    Block *b = s->blocks + block;
    if (kept(s, b->size, size) != b->size) {
        i32 rest = block_slot(s);
        Block *r = s->blocks + rest;
        *r = (Block){b->size - size, b->address + size, b->segment, block, b->after, key, 1};
        if (r->after != NONE) s->blocks[r->after].before = rest;
        b->size = size;
        b->after = rest;
        put(s, key, r->size, r->address, rest);
    }
    b->free = 0;
    *made = block;
    return s->full ? FULL : DONE;
}

static void free_block(State *s, i32 block) {
    Block *b = s->blocks + block;
    i32 key = b->key;
    if (b->after != NONE && s->blocks[b->after].free) {
        i32 gone = b->after;
        Block *after = s->blocks + gone;
        drop(s, key, position(s, key, after->size, after->address));
        b->size += after->size;
        b->after = after->after;
        if (b->after != NONE) s->blocks[b->after].before = block;
        forget(s, gone);
    }
    if (b->before != NONE && s->blocks[b->before].free) {
        i32 into = b->before;
        Block *before = s->blocks + into;
        drop(s, key, position(s, key, before->size, before->address));
        before->size += b->size;
        before->after = b->after;
        if (before->after != NONE) s->blocks[before->after].before = into;
        forget(s, block);
        block = into;
        b = before;
    }
    b->free = 1;
    put(s, key, b->size, b->address, block);
}

/* --- usage.py */

/* Bytes that `begin` lays a state out in. */
EXPORT(bytes) i32 bytes(i32 room, i32 n_numbers) {
    return (i32)(sizeof(State) + (u64)room * (sizeof(Block) + sizeof(i32) + KEYS * sizeof(Entry) + sizeof(Hole) + 2 * sizeof(i64)) +
                 (u64)n_numbers * (sizeof(i64) + sizeof(i32)) + 64);
}

static u8 *lay_out(State *s, i32 room, i32 n_numbers) {
    u8 *at = (u8 *)(((u64)(s + 1) + 7) / 8 * 8);
    s->room = room;
    s->n_numbers = n_numbers;
    s->blocks = (Block *)at, at += sizeof(Block) * (u64)room;
    for (i32 key = 0; key < KEYS; key++) s->pools[key] = (Entry *)at, at += sizeof(Entry) * (u64)room;
    s->holes = (Hole *)at, at += sizeof(Hole) * (u64)room;
    s->starts = (i64 *)at, at += sizeof(i64) * (u64)room;
    s->ends = (i64 *)at, at += sizeof(i64) * (u64)room;
    s->sizes = (i64 *)at, at += sizeof(i64) * (u64)n_numbers;
    s->slots = (i32 *)at, at += sizeof(i32) * (u64)room;
    s->live = (i32 *)at, at += sizeof(i32) * (u64)n_numbers;
    return at;
}

/* A run that has not begun. */
EXPORT(begin) void begin(State *s, i32 room, i32 n_numbers, i64 most) {
    __builtin_memset(s, 0, sizeof(State));
    lay_out(s, room, n_numbers);
    s->most = most;
    for (i32 i = 0; i < 3; i++) s->holes[i] = AT_START[i];
    s->n_holes = 3;
}

/* Where the sizes of blocks are. */
EXPORT(sizes) const i64 *sizes(const State *s) { return s->sizes; }

EXPORT(limit) void limit(State *s, i64 lowest, i64 highest) { s->lowest = lowest, s->highest = highest; }

EXPORT(copy) void copy(State *to, const State *from) {
    *to = *from;
    lay_out(to, from->room, from->n_numbers);
    move(to->blocks, from->blocks, sizeof(Block) * (u64)from->n_blocks);
    move(to->slots, from->slots, sizeof(i32) * (u64)from->n_free_slots);
    for (i32 key = 0; key < KEYS; key++) move(to->pools[key], from->pools[key], sizeof(Entry) * (u64)from->n_pool[key]);
    move(to->holes, from->holes, sizeof(Hole) * (u64)from->n_holes);
    move(to->starts, from->starts, sizeof(i64) * (u64)from->n_chunks);
    move(to->ends, from->ends, sizeof(i64) * (u64)from->n_chunks);
    move(to->live, from->live, sizeof(i32) * (u64)from->n_numbers);
    move(to->sizes, from->sizes, sizeof(i64) * (u64)from->n_numbers);
}

/* A stream and where its player writes. */
typedef struct {
    const i64 *rounded;
    const u8 *streams;
    const i32 *order;
    const u8 *releases;
    const i32 *carried;
    i64 *levels;
    i32 *flushes;
    u64 *layout;
    i32 n_carried;
} Run;

typedef struct {
    i32 position, n_levels, n_flushes, keep;
    i64 reserved, allocated, needed;
} Report;

/* Events from `at` to before `end`. What is reserved goes to `levels` as (position, bytes), flushes' positions to `flushes`. */
EXPORT(play) i32 play(State *s, const Run *run, Report *report, i32 at, i32 end) {
    const i64 *rounded = run->rounded;
    const i32 *order = run->order;
    i64 *levels = run->levels;
    i32 result = DONE, n_levels = 0, n_flushes = 0;
    for (; at < end; at++) {
        i32 event = order[at];
        if (event < 0) {
            if (rounded[-event - 1]) {
                i32 block = s->live[-event - 1];
                s->allocated -= s->blocks[block].size;
                free_block(s, block);
                if (s->full) result = FULL;
                if (result) break;
            }
            continue;
        }
        i64 size = rounded[event - 1];
        if (!size) continue;
        if (run->releases[at]) release(s);
        i32 block = 0;
        result = allocate(s, size, run->streams[event - 1], &block);
        if (result == PARTING || result == FULL) break;
        if (result == DONE) {
            s->live[event - 1] = block;
            s->allocated += s->blocks[block].size;
            if (report->keep) s->sizes[event - 1] = s->blocks[block].size;
        }
        if (s->reserved != s->noted) {
            levels[2 * n_levels] = at + 1;
            levels[2 * n_levels++ + 1] = s->noted = s->reserved;
        }
        if (s->retries > s->flushes) {
            run->flushes[n_flushes++] = at;
            s->flushes++;
        }
        if (result) break;
    }
    *report = (Report){at, n_levels, n_flushes, report->keep, s->reserved, s->allocated, s->needed};
    return result;
}

static u64 mixed(u64 hash, u64 value) {
    hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccdull;
    return hash ^ (hash >> 32);
}

/* What the step left becomes what the next one finds; two 64-bit numbers that stand for the layout are written to `layout`. */
EXPORT(turn) void turn(State *s, const Run *run, i32 turned) {
    const i32 *carried = run->carried, n_carried = run->n_carried;
    for (i32 i = 0; turned && i < n_carried; i++) s->live[carried[2 * i] - 1] = s->live[carried[2 * i + 1] - 1];
    for (i32 which = 0; which < 2; which++) {
        u64 hash = mixed((u64)which * 0x5851f42d4c957f2dull + 1, (u64)s->reserved);
        for (i32 key = 0; key < KEYS; key++) {
            hash = mixed(hash, (u64)s->n_pool[key]);
            for (i32 i = 0; i < s->n_pool[key]; i++) hash = mixed(mixed(hash, (u64)s->pools[key][i].size), (u64)s->pools[key][i].address);
        }
        hash = mixed(hash, (u64)s->n_holes);
        for (i32 i = 0; i < s->n_holes; i++) hash = mixed(mixed(hash, (u64)s->holes[i].address), (u64)s->holes[i].size);
        for (i32 i = 0; i < s->n_chunks; i++) hash = mixed(hash, (u64)s->starts[i]);
        for (i32 i = 0; i < n_carried; i++) hash = mixed(hash, (u64)s->blocks[s->live[carried[2 * i] - 1]].address);
        run->layout[which] = hash;
    }
}

/* Attention of query blocks over the pages of their slot: softmax(q k^T / sqrt(d)) v, no mask inside a block's horizon.
 *
 * On a Hopper GPU with heads of 128: the query heads that share a key head lie one behind the other, so that a block of
 * B positions is (heads / kv_heads) * B rows against the same keys and values; a unit is 64 of these rows, one
 * warpgroup's. Keys run in steps of 64 from position 0, with a running maximum, and every CHUNK keys start anew: the
 * chunks' results are joined in order. Neither depends on anything but the number of keys, so whether one block takes a
 * unit through all its chunks, or several take a chunk each and the last to finish joins them (few spans), the bits are
 * the same.
 *
 * One warp asks for the keys, one for the values, one for the queries, each box by a lane of its own. Where the kernel
 * before is `rotate`, which lets the next begin only when all before itself has ended, all but the queries and the
 * pages that it writes is asked for while it runs (cuda.settled).
 *
 * Any other shape: a warp takes a query row. */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"

#include <limits.h>

enum {
    HEAD = 128,
    KEYS = 64,              /* of a step */
    CHUNK_STEPS = 4,        /* 256 keys */
    SPLIT_STEPS = 2,        /* what a chunk's way through device memory takes, in steps */
    UNIT = 64,              /* rows of a warpgroup */
    HALF = UNIT * TILE_ROW, /* 64 rows by half a head: bytes */
    QUERY_BYTES = 4 * HALF, /* two units */
    STAGE_BYTES = 4 * HALF, /* keys, then values */
    STAGES = 3,
    AT_RING = 2 * QUERY_BYTES,
    AT_TOTAL = AT_RING + STAGES * STAGE_BYTES, /* each warpgroup's chunks so far: F32 [HEAD / 2, 128] */
    AT_BARRIERS = AT_TOTAL + 2 * HEAD / 2 * 128 * 4,
    AT_LAST = AT_BARRIERS + (2 * STAGES + 4) * 8,
    AT_PLAN = AT_LAST + 8,
    AT_SPANS = (AT_PLAN + 12 + 15) / 16 * 16,
    SHARED = AT_SPANS + WARP * 16,
    THREADS = 384,
    UNITS_MOST = 1024,             /* that may be split */
    CHUNKS_MOST = 4096,            /* of all split units */
    PARTIAL = (HEAD / 8 + 1) * 128 /* what a unit's chunk leaves: four floats each */
};

typedef struct attend_op {
    tensor y, page;
    const span *spans;
    const int32_t *span_count;
    float4 *partial; /* [units that may be split, most_chunks, PARTIAL] */
    int span_rows;   /* most spans */
    int block, heads, kv_heads, group;
    int units;       /* of one key head */
    int split_units; /* there is room for the chunks of so many */
    int most_chunks;
    int page_base; /* the layer's first page */
    float scale;   /* log2(e) / sqrt(HEAD) */
    bool settled;  /* cuda.settled, of the kernel before this one */
} attend_op;

/* A piece of work: `count` units from `unit` on, against steps [from, to) of the keys. */
typedef struct attend_item {
    span at;
    int kv_head, unit, count, from, to, keys, chunk, chunks;
    int index; /* among all units, where they are split */
} attend_item;

/* How many pieces there are. chunks 0: a piece is two units and all their chunks; else it is one unit and one chunk, of
 * so many at most. */
typedef struct attend_plan {
    int items, chunks;
    int known; /* spans that lie in shared memory; 0: there are too many */
} attend_plan;

/* What is read before after_previous() comes past L1, where lines of the forward before may lie. */
static __device__ __forceinline__ span attend_span(const span *from)
{
    int4 v = __ldcg((const int4 *)from);
    return {v.x, v.y, v.z, v.w};
}

/* Units are split where their chunks all find room at once, or where it ends earlier. By a whole warp. */
static __device__ void attend_divide(const attend_op &op, uint8_t *room)
{
    int lane = (int)threadIdx.x;
    span at = {};
    if (lane < op.span_rows) /* beside the count */
        at = attend_span(op.spans + lane);
    int spans = op.span_count ? __ldcg(op.span_count) : op.span_rows;
    spans = spans < op.span_rows ? spans : op.span_rows;
    int pairs = spans * op.kv_heads * ((op.units + 1) / 2), units = spans * op.kv_heads * op.units;
    attend_plan plan = {pairs, 0, spans <= WARP ? spans : 0};
    if (units <= op.split_units && spans <= WARP) {
        int keys = lane < spans ? (at.block + 1) * op.block : 0;
        int steps = (keys + KEYS - 1) / KEYS, chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
        int most_steps = __reduce_max_sync(EVERY_LANE, steps), most = __reduce_max_sync(EVERY_LANE, chunks);
        int all = __reduce_add_sync(EVERY_LANE, chunks) * op.kv_heads * op.units, grid = (int)gridDim.x;
        bool sooner = (all + grid - 1) / grid * (CHUNK_STEPS + SPLIT_STEPS) < (pairs + grid - 1) / grid * most_steps;
        if (most > 1 && (all <= grid || sooner)) {
            plan.items = units * most;
            plan.chunks = most;
        }
    }
    if (lane < plan.known)
        *((span *)(room + AT_SPANS) + lane) = at;
    if (lane == 0)
        *(attend_plan *)(room + AT_PLAN) = plan;
}

/* Piece i; false: there is nothing to do. Behind after_previous(), or where the spans are known. */
static __device__ __forceinline__ bool attend_find(const attend_op &op, const uint8_t *room, int i, attend_item &w)
{
    const attend_plan plan = *(const attend_plan *)(room + AT_PLAN);
    const int split = plan.chunks;
    int chunk = 0, tiles = split ? op.units : (op.units + 1) / 2;
    if (split) {
        chunk = i % split;
        i /= split;
    }
    w.index = i;
    w.unit = i % tiles * (split ? 1 : 2);
    w.kv_head = i / tiles % op.kv_heads;
    i = i / tiles / op.kv_heads;
    w.at = plan.known ? ((const span *)(room + AT_SPANS))[i] : op.spans[i];
    w.count = split || w.unit + 1 == op.units ? 1 : 2;
    w.keys = (w.at.block + 1) * op.block;
    int steps = (w.keys + KEYS - 1) / KEYS;
    w.chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
    w.chunk = chunk;
    w.from = split ? chunk * CHUNK_STEPS : 0;
    w.to = split && w.from + CHUNK_STEPS < steps ? w.from + CHUNK_STEPS : steps;
    return w.from < w.to;
}

typedef struct attend_rings {
    uint32_t at, full, empty, query_full, query_empty;
} attend_rings;

static __device__ __forceinline__ attend_rings attend_shared(const uint8_t *room)
{
    const uint32_t at = shared_at(room), barriers = at + AT_BARRIERS;
    return {at, barriers, barriers + STAGES * 8, barriers + 2 * STAGES * 8, barriers + (2 * STAGES + 2) * 8};
}

/* Queries, by one warp. */
static __device__ void attend_feed_queries(const attend_op &op, const uint8_t *room, const CUtensorMap *q)
{
    const attend_rings b = attend_shared(room);
    const attend_plan plan = *(const attend_plan *)(room + AT_PLAN);
    const int lane = (int)threadIdx.x % WARP;
    uint32_t query = 0, parity = 1;
    const uint32_t page_bytes = (uint32_t)op.block * TILE_ROW;
    if (!plan.known)
        after_previous(); /* spans come through L1 */
#pragma unroll 1
    for (int i = (int)blockIdx.x; i < plan.items; i += (int)gridDim.x) {
        attend_item w;
        if (!attend_find(op, room, i, w))
            continue;
        int first = w.unit * UNIT / op.block,
            last = (w.unit + w.count) * UNIT / op.block; /* query heads of the group */
        int boxes = ((last < op.group ? last : op.group) - first) * 2;
        uint32_t full = b.query_full + 8 * query, to = b.at + query * QUERY_BYTES;
        to += (uint32_t)(lane % 2) * 2 * HALF + (uint32_t)(lane / 2) * page_bytes;
        after_previous();
        barrier_wait(b.query_empty + 8 * query, parity);
        if (lane == 0)
            barrier_expect(full, (uint32_t)boxes * page_bytes);
        if (lane < boxes)
            copy_box2(to, q, full, (w.kv_head * op.group + first + lane / 2) * HEAD + lane % 2 * 64, w.at.row);
        query ^= 1;
        parity ^= query == 0;
    }
    after_previous(); /* no block ends before what came before it */
}

/* The first block of this slot that the forward writes: keys and values before it are there. By a whole warp. */
static __device__ __forceinline__ int attend_old(const attend_plan &plan, const uint8_t *room, int slot)
{
    int lane = (int)threadIdx.x % WARP;
    span at = ((const span *)(room + AT_SPANS))[lane];
    return __reduce_min_sync(EVERY_LANE, lane < plan.known && at.slot == slot ? at.block : INT_MAX);
}

/* Keys, or values (`behind` in a stage), by one warp each: a lane has half a page of each step. What `rotate` does not
 * write is asked for before it has ended. */
static __device__ void attend_feed_pages(const attend_op &op, const uint8_t *room, const CUtensorMap *map,
                                         uint32_t behind)
{
    const attend_rings b = attend_shared(room);
    const attend_plan plan = *(const attend_plan *)(room + AT_PLAN);
    const int lane = (int)threadIdx.x % WARP, pages = KEYS / op.block; /* of a step; four steps' are at most a warp */
    const uint32_t into = b.at + AT_RING + behind + (uint32_t)(lane % 2 * HALF + lane / 2 * op.block * TILE_ROW);
    uint32_t stage = 0, parity = 1;
    bool waited = !op.settled || !plan.known;
    if (waited)
        after_previous();
#pragma unroll 1
    for (int i = (int)blockIdx.x; i < plan.items; i += (int)gridDim.x) {
        attend_item w;
        if (!attend_find(op, room, i, w))
            continue;
        const int old = waited ? 0 : attend_old(plan, room, w.at.slot), column = w.kv_head * HEAD + lane % 2 * 64;
        const int32_t *of = row_of<int32_t>(op.page, w.at.slot);
        /* behind the last block its page again: those scores are masked, but 0 times a value must be 0 */
        int at = w.from * pages + lane, next = __ldcg(of + (at < w.at.block ? at : w.at.block));
#pragma unroll 1
        for (int first = w.from; first < w.to; first += CHUNK_STEPS) {
            const int ids = next, end = first + CHUNK_STEPS < w.to ? first + CHUNK_STEPS : w.to;
            if (end < w.to) { /* a lane has a page of the chunk, and of the one behind it */
                at += CHUNK_STEPS * pages;
                next = __ldcg(of + (at < w.at.block ? at : w.at.block));
            }
#pragma unroll 1
            for (int t = first; t < end; t++) {
                int page = __shfl_sync(EVERY_LANE, ids, (t - first) * pages + lane / 2);
                uint32_t done = b.full + 8 * stage;
                if (!waited && (t + 1) * pages > old) {
                    after_previous();
                    waited = true;
                }
                barrier_wait(b.empty + 8 * stage, parity);
                if (lane == 0)
                    barrier_expect(done, STAGE_BYTES / 2);
                if (lane < 2 * pages)
                    copy_box2(into + stage * STAGE_BYTES, map, done, column, (op.page_base + page) * op.block);
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
    }
    after_previous();
}

/* What a thread knows of its two rows (16 (t / 32) + (t % 32) / 4 of the unit, and 8 further). */
typedef struct attend_rows {
    float most[2], sum[2];
} attend_rows;

/* Units that are split: how many of their chunks are done. Left at zero by whoever joins them. */
static __device__ int32_t chunks_done[UNITS_MOST];

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 1));
    return fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(EVERY_LANE, x, 1);
    return x + __shfl_xor_sync(EVERY_LANE, x, 2);
}

/* How two partial results meet: what each is multiplied with. `all` becomes both. */
static __device__ __forceinline__ void attend_meet(attend_rows &all, const attend_rows &r, float (&a)[2], float (&b)[2],
                                                   float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = fmaxf(all.most[i], r.most[i]);
        a[i] = power2(__fmul_rn(all.most[i] - most, scale));
        b[i] = power2(__fmul_rn(r.most[i] - most, scale));
        all.most[i] = most;
        all.sum[i] = __fmaf_rn(all.sum[i], a[i], __fmul_rn(r.sum[i], b[i]));
    }
}

/* s = q k^T of a unit and a step; the caller commits. */
static __device__ __forceinline__ void attend_scores(float (&s)[KEYS / 2], uint32_t q, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++)
        product<KEYS>::run(s, operand(q + (uint32_t)(i / 4) * 2 * HALF) + 2 * (i % 4),
                           operand(k + (uint32_t)(i / 4) * HALF) + 2 * (i % 4), i > 0);
}

/* Scores to exponentials, in place; `fresh`: the first step of a chunk. Sets by how much what came before
 * shrinks. */
static __device__ __forceinline__ void attend_softmax(float (&s)[KEYS / 2], attend_rows &r, float (&shrink)[2],
                                                      int keys, bool fresh, float scale)
{
    int quad = (int)threadIdx.x % 4;
    if (keys < KEYS) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 4 * 8 + quad * 2 + i % 2 >= keys)
                s[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = fresh ? -INFINITY : r.most[h];
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 2 % 2 == h)
                most = fmaxf(most, s[i]);
        most = quad_max(most);
        shrink[h] = fresh ? 0.0f : power2((r.most[h] - most) * scale);
        r.most[h] = most;
        float shift = most * scale, sum = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 2 % 2 == h) {
                s[i] = power2(__fmaf_rn(s[i], scale, -shift));
                sum += s[i];
            }
        r.sum[h] = fresh ? sum : __fmaf_rn(r.sum[h], shrink[h], sum);
    }
}

/* The unit's result: through the room of its queries, rows of 128 bytes to y. */
static __device__ __forceinline__ void attend_out(const attend_op &op, const attend_item &w, int side,
                                                  const float (&o)[HEAD / 2], const attend_rows &r, uint32_t room)
{
    int me = (int)threadIdx.x % 128, warp = me / WARP, lane = me % WARP;
    float scale[2] = {1 / r.sum[0], 1 / r.sum[1]};
    meet(1 + side, 128); /* nobody reads these queries any more */
#pragma unroll
    for (int i = 0; i < HEAD / 4; i++) { /* columns 8 (i / 2) + 2 (lane % 4) of row i % 2 */
        int row = 16 * warp + lane / 4 + i % 2 * 8, chunk = i / 2 % 8;
        uint32_t at = room + (uint32_t)(i / 16) * 2 * HALF +
                      (uint32_t)(row * TILE_ROW + ((chunk ^ (row & 7)) << 4) + lane % 4 * 4);
        uint32_t v = pair(o[4 * (i / 2) + 2 * (i % 2)] * scale[i % 2], o[4 * (i / 2) + 2 * (i % 2) + 1] * scale[i % 2]);
        shared_store4(at, v);
    }
    meet(1 + side, 128);
    int first = me / 16, chunk = me % 8, half = me / 8 % 2; /* 64 rows of two halves of eight chunks, 8 rows a time */
    int all = (w.unit + side) * UNIT + first, head = all / op.block, position = all % op.block;
    for (int row = first; row < UNIT; row += 8) {
        if (head < op.group) {
            bf16 *to = row_of<bf16>(op.y, w.at.row + position) + (w.kv_head * op.group + head) * HEAD;
            *(uint4 *)(to + half * 64 + chunk * 8) = shared_load16(
                room + (uint32_t)half * 2 * HALF + (uint32_t)(row * TILE_ROW + ((chunk ^ (row & 7)) << 4)));
        }
        position += 8; /* blocks are whole eights */
        if (position >= op.block) {
            position -= op.block;
            head++;
        }
    }
    fence_written(); /* before the copy engine writes here */
}

/* What a thread left of a chunk in device memory: four floats each, 128 apart; its rows behind them. */
static __device__ __forceinline__ void attend_fetch4(const float4 *from, int i, float (&o)[HEAD / 2])
{
    float4 v = __ldcg(from + i * 128);
    o[4 * i] = v.x, o[4 * i + 1] = v.y, o[4 * i + 2] = v.z, o[4 * i + 3] = v.w;
}

static __device__ __forceinline__ attend_rows attend_fetch_rows(const float4 *from)
{
    float4 v = __ldcg(from + HEAD / 8 * 128);
    return {{v.x, v.y}, {v.z, v.w}};
}

/* A chunk of a split unit waits in device memory; whoever finishes the last one joins them all, in order, each fetched
 * while the one before is joined. Where the second of two chunks is the shorter one by two steps or more, it is mostly
 * there when the first ends, which then need not leave its own. True: it was this warpgroup, and o and all are the
 * unit's. */
static __device__ __forceinline__ bool attend_gather(const attend_op &op, const attend_item &w, int side,
                                                     float (&o)[HEAD / 2], attend_rows &all, int32_t *last)
{
    int me = (int)threadIdx.x % 128;
    float4 *unit = op.partial + (int64_t)w.index * op.most_chunks * PARTIAL + me;
    bool kept = w.chunk == 0 && w.keys <= (2 * CHUNK_STEPS - 2) * KEYS;
    if (kept) {
        if (me == 0)
            *last = counted_in(&chunks_done[w.index]) == w.chunks - 1;
        meet(1 + side, 128);
        kept = *last;
    }
    if (!kept) {
        float4 *mine = unit + (int64_t)w.chunk * PARTIAL;
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++)
            mine[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        mine[HEAD / 8 * 128] = make_float4(all.most[0], all.most[1], all.sum[0], all.sum[1]);
        meet(1 + side, 128);
        if (me == 0)
            *last = count_in(&chunks_done[w.index]) == w.chunks - 1;
        meet(1 + side, 128);
        if (!*last)
            return false;
        all = attend_fetch_rows(unit);
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++)
            attend_fetch4(unit, i, o);
    }
    float x[HEAD / 2];
    attend_rows r = attend_fetch_rows(unit + PARTIAL);
#pragma unroll
    for (int i = 0; i < HEAD / 8; i++)
        attend_fetch4(unit + PARTIAL, i, x);
    for (int c = 1; c < w.chunks; c++) {
        float a[2], b[2];
        const float4 *behind = unit + (int64_t)(c + 1) * PARTIAL;
        const bool more = c + 1 < w.chunks;
        attend_meet(all, r, a, b, op.scale);
        if (more)
            r = attend_fetch_rows(behind);
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++) {
#pragma unroll
            for (int j = 4 * i; j < 4 * i + 4; j++)
                o[j] = __fmaf_rn(o[j], a[j / 2 % 2], __fmul_rn(x[j], b[j / 2 % 2]));
            if (more)
                attend_fetch4(behind, i, x);
        }
    }
    if (me == 0)
        chunks_done[w.index] = 0;
    return true;
}

static __device__ __forceinline__ void attend_release(uint32_t barrier)
{
    if (threadIdx.x % WARP == 0)
        barrier_arrive(barrier);
}

/* o (+)= p v of a unit and a step; the caller commits. */
static __device__ __forceinline__ void attend_values(float (&o)[HEAD / 2], const uint32_t (&p)[KEYS / 16][4],
                                                     uint32_t v, int add)
{
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        product_across<128>::run(o, p[i], operand_across(v + (uint32_t)i * 2 * ATOM, HALF), i > 0 ? 1 : add);
}

/* The chunk that step t belongs to is complete in o and r: o, and all, become what the chunks up to it have come to.
 * Kept in `total` (this thread's, 128 apart) where more follow. */
static __device__ __forceinline__ void attend_end_chunk(const attend_op &op, int from, int t, float (&o)[HEAD / 2],
                                                        attend_rows r, attend_rows &all, float *total, bool more)
{
    float a[2] = {0, 0}, b[2] = {1, 1};
    const bool join = t - from >= CHUNK_STEPS;
    r.sum[0] = quad_sum(r.sum[0]);
    r.sum[1] = quad_sum(r.sum[1]);
    if (join)
        attend_meet(all, r, a, b, op.scale);
    else
        all = r;
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) {
        if (join)
            o[i] = __fmaf_rn(total[i * 128], a[i / 2 % 2], __fmul_rn(o[i], b[i / 2 % 2]));
        if (more)
            total[i * 128] = o[i];
    }
}

/* Step t from its scores to p, what is multiplied with its values. The exponentials run beside the product of the step
 * before with its values, which is over when this returns. */
static __device__ __forceinline__ void attend_step(const attend_op &op, const attend_rings &b, int from, int t,
                                                   int keys, float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 16][4],
                                                   float (&o)[HEAD / 2], attend_rows &r, attend_rows &all, float *total,
                                                   uint32_t stage)
{
    const bool fresh = t % CHUNK_STEPS == 0;
    const attend_rows before = r;
    float shrink[2];
    attend_softmax(s, r, shrink, keys - t * KEYS, fresh, op.scale);
    products_wait<0>();
    hold(o);
    hold(s); /* p replaces the registers of that product */
    if (t > from) {
        attend_release(b.empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
        if (fresh)
            attend_end_chunk(op, from, t - 1, o, before, all, total, true);
    }
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++)
        o[i] *= shrink[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        p[i / 4][i % 4] = pair(s[2 * i], s[2 * i + 1]);
}

static __device__ void attend_consume(const attend_op &op, uint8_t *room, int side)
{
    const attend_rings b = attend_shared(room);
    const attend_plan plan = *(const attend_plan *)(room + AT_PLAN);
    float *total = (float *)(room + AT_TOTAL) + side * (HEAD / 2 * 128) + threadIdx.x % 128;
    int32_t *last = (int32_t *)(room + AT_LAST) + side;
    uint32_t stage = 0, parity = 0, query = 0, query_parity = 0;
    after_previous();
    for (int i = (int)blockIdx.x; i < plan.items; i += (int)gridDim.x) {
        attend_item w;
        if (!attend_find(op, room, i, w))
            continue;
        const uint32_t q = b.at + query * QUERY_BYTES + (uint32_t)side * HALF;
        barrier_wait(b.query_full + 8 * query, query_parity);
        if (side >= w.count) {
            for (int t = w.from; t < w.to; t++) {
                barrier_wait(b.full + 8 * stage, parity);
                attend_release(b.empty + 8 * stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                parity ^= stage == 0;
            }
        } else {
            float s[KEYS / 2], o[HEAD / 2];
            attend_rows r, all;
            barrier_wait(b.full + 8 * stage, parity);
            products_begin();
            attend_scores(s, q, b.at + AT_RING + stage * STAGE_BYTES);
            products_commit();
            products_wait<0>();
            hold(s);
            const int from = w.from, to = w.to, keys = w.keys;
            for (int t = from; t + 1 < to; t++) {
                uint32_t p[KEYS / 16][4];
                attend_step(op, b, from, t, keys, s, p, o, r, all, total, stage);
                const uint32_t values = b.at + AT_RING + stage * STAGE_BYTES + 2 * HALF;
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                parity ^= stage == 0;
                barrier_wait(b.full + 8 * stage, parity);
                products_begin();
                attend_scores(s, q, b.at + AT_RING + stage * STAGE_BYTES);
                products_commit();
                attend_values(o, p, values, t % CHUNK_STEPS != 0);
                products_commit();
                products_wait<1>();
                hold(s);
            }
            uint32_t p[KEYS / 16][4];
            attend_step(op, b, from, to - 1, keys, s, p, o, r, all, total, stage);
            products_begin();
            attend_values(o, p, b.at + AT_RING + stage * STAGE_BYTES + 2 * HALF, (to - 1) % CHUNK_STEPS != 0);
            products_commit();
            products_wait<0>();
            hold(o);
            attend_release(b.empty + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            parity ^= stage == 0;
            attend_end_chunk(op, from, to - 1, o, r, all, total, false);
            attend_find(op, room, i, w); /* once more, rather than kept through the steps */
            if (!plan.chunks || w.chunks == 1 || attend_gather(op, w, side, o, all, last))
                attend_out(op, w, side, o, all, q);
        }
        attend_release(b.query_empty + 8 * query);
        query ^= 1;
        query_parity ^= query == 0;
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap v, const __grid_constant__ attend_op op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    if (threadIdx.x == 0) {
        const attend_rings b = attend_shared(room);
        prefetch_map(&q);
        prefetch_map(&k);
        prefetch_map(&v);
        for (uint32_t i = 0; i < STAGES; i++) {
            barrier_init(b.full + 8 * i, 2);  /* keys, values */
            barrier_init(b.empty + 8 * i, 8); /* the warps that multiply */
        }
        for (uint32_t i = 0; i < 2; i++) {
            barrier_init(b.query_full + 8 * i, 1);
            barrier_init(b.query_empty + 8 * i, 8);
        }
        barrier_init_done();
    }
    let_next();
    if (!op.settled)
        after_previous();
    if (threadIdx.x < WARP)
        attend_divide(op, room);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_fewer<40>();
        const int warp = __shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0); /* seen to be one for all lanes */
        if (warp < 2)
            attend_feed_pages(op, room, warp == 0 ? &k : &v, (uint32_t)warp * 2 * HALF);
        else if (warp == 2)
            attend_feed_queries(op, room, &q);
        else
            after_previous();
    } else {
        registers_more<232>();
        attend_consume(op, room, (int)threadIdx.x / 128 - 1);
    }
#else
    (void)q, (void)k, (void)v, (void)op;
    __trap(); /* the launcher asks cuda_is_hopper */
#endif
}

static status attend_wide(cuda *c, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                          const slots *s, const attention_rule *r)
{
    status st = OK;
    attend_op op = {.y = *y,
                    .page = s->page,
                    .spans = (const span *)in->span.data,
                    .span_count = in->span.used,
                    .partial = NULL,
                    .span_rows = (int)in->span.rows,
                    .block = r->block_size,
                    .heads = r->heads,
                    .kv_heads = r->kv_heads,
                    .group = r->heads / r->kv_heads,
                    .units = (r->heads / r->kv_heads * r->block_size + UNIT - 1) / UNIT,
                    .split_units = 0,
                    .most_chunks = (s->max_blocks * r->block_size + KEYS * CHUNK_STEPS - 1) / (KEYS * CHUNK_STEPS),
                    .page_base = layer * kv->page_count,
                    .scale = 1.44269504f / sqrtf((float)HEAD),
                    .settled = c->settled};
    int most = op.span_rows * op.kv_heads * op.units;
    int split = CHUNKS_MOST / op.most_chunks < c->sm_count ? CHUNKS_MOST / op.most_chunks : c->sm_count;
    if (op.most_chunks > 1) {
        op.split_units = split < most ? split : most;
        void *room;
        st = cuda_scratch(c, &room, (size_t)op.split_units * (size_t)op.most_chunks * PARTIAL * sizeof(float4));
        op.partial = (float4 *)room;
    }
    CUtensorMap q_map, k_map, v_map;
    if (st == OK)
        st = cuda_map_rows(&q_map, qkv, r->block_size);
    if (st == OK)
        st = cuda_map_rows(&k_map, &kv->k, r->block_size);
    if (st == OK)
        st = cuda_map_rows(&v_map, &kv->v, r->block_size);
    if (st != OK)
        return st;
    cudaError_t e = cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (e != cudaSuccess)
        return cuda_check(e, "attention", __FILE__, __LINE__);
    return launch(c, "attention", attend_kernel, cuda_grid(c, (int64_t)most * op.most_chunks, 1), THREADS, SHARED,
                  q_map, k_map, v_map, op);
}

/* ---- any shape: a warp takes one head's query row; 32 keys at a time, one a lane, with a running maximum */

enum { PLAIN_WARPS = 4, PLAIN_HEAD = 256 };

static __global__ void __launch_bounds__(PLAIN_WARPS *WARP)
    plain_kernel(tensor y, tensor qkv, kv_pool kv, tensor spans, tensor pages, int page_base, int block, int heads,
                 int kv_heads, int dim)
{
    __shared__ float query[PLAIN_WARPS][PLAIN_HEAD];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    let_next();
    after_previous();
    int64_t items = used_rows(spans) * block * heads, step = (int64_t)gridDim.x * PLAIN_WARPS;
    float scale = rsqrtf((float)dim);
    for (int64_t i = (int64_t)blockIdx.x * PLAIN_WARPS + warp; i < items; i += step) {
        span at = ((const span *)spans.data)[i / heads / block];
        int head = (int)(i % heads), kv_head = head / (heads / kv_heads);
        int64_t row = at.row + i / heads % block;
        const int32_t *page = row_of<int32_t>(pages, at.slot);
        for (int d = lane; d < dim; d += WARP)
            query[warp][d] = widen(row_of<bf16>(qkv, row)[head * dim + d]) * scale;
        __syncwarp();
        float most = -INFINITY, sum = 0, o[PLAIN_HEAD / WARP] = {};
        int keys = (at.block + 1) * block;
        for (int first = 0; first < keys; first += WARP) {
            int key = first + lane < keys ? first + lane : keys - 1;
            int64_t where = (int64_t)(page_base + page[key / block]) * block + key % block;
            const bf16 *k = row_of<bf16>(kv.k, where) + kv_head * dim;
            float score = 0;
            for (int d = 0; d < dim; d++)
                score = fmaf(query[warp][d], widen(k[d]), score);
            score = first + lane < keys ? score : -INFINITY;
            float peak = score;
            for (int half = WARP / 2; half > 0; half /= 2)
                peak = fmaxf(peak, __shfl_xor_sync(EVERY_LANE, peak, half));
            peak = fmaxf(peak, most);
            float shrink = __expf(most - peak), p = __expf(score - peak);
            most = peak;
            sum = sum * shrink + warp_sum(p);
            for (int j = 0; j < PLAIN_HEAD / WARP; j++)
                o[j] *= shrink;
            for (int t = 0; t < WARP && first + t < keys; t++) {
                float weight = __shfl_sync(EVERY_LANE, p, t);
                const bf16 *v = row_of<bf16>(kv.v, __shfl_sync(EVERY_LANE, where, t)) + kv_head * dim;
                for (int j = 0; j < PLAIN_HEAD / WARP; j++)
                    if (j * WARP + lane < dim)
                        o[j] = fmaf(weight, widen(v[j * WARP + lane]), o[j]);
            }
        }
        __syncwarp();
        for (int j = 0; j < PLAIN_HEAD / WARP; j++)
            if (j * WARP + lane < dim)
                narrow(&row_of<bf16>(y, row)[head * dim + j * WARP + lane], o[j] / sum);
    }
}

static bool aligned(const tensor *t)
{
    return (uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0;
}

extern "C" status cuda_attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                              const slots *s, const attention_rule *r)
{
    cuda *c = cuda_of(b);
    assert(y->type == BF16 && qkv->type == BF16 && kv->k.type == BF16 && kv->v.type == BF16);
    assert(y->cols == r->heads * r->head_dim && r->heads % r->kv_heads == 0 && r->head_dim <= PLAIN_HEAD);
    if (in->span.rows == 0)
        return OK;
    if (r->head_dim == HEAD && r->block_size % 8 == 0 && KEYS % r->block_size == 0 && aligned(y) && aligned(qkv) &&
        aligned(&kv->k) && aligned(&kv->v) && (uintptr_t)in->span.data % 16 == 0 && cuda_is_hopper(c))
        return attend_wide(c, y, qkv, kv, layer, in, s, r);
    int64_t items = in->span.rows * r->block_size * r->heads;
    return launch(c, "attention", plain_kernel, cuda_grid(c, (items + PLAIN_WARPS - 1) / PLAIN_WARPS, 16),
                  PLAIN_WARPS * WARP, 0, *y, *qkv, *kv, in->span, s->page, layer * kv->page_count, r->block_size,
                  r->heads, r->kv_heads, r->head_dim);
}

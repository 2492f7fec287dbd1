/* The heavy kernels of the CUDA backend at the shapes of LLaDA2.0-mini (and flash), each beside its floor: the bytes it
 * must move and the operations it must do over two ceilings measured here, a device copy and cuBLASLt's 8192^3 BF16
 * product. A call is timed as many of it in a graph, weights taken in turn where they would stay in the cache; median
 * of five replays. The parts of a call (indented) are its kernels, each timed alone in the same way.
 *
 * bench_cuda [products|route|experts|residual|attention|head]...   all of them without an argument */
#include "cuda/kernels.h"

#include <cublasLt.h>
#include <cuda_bf16.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

typedef __nv_bfloat16 bf16;

static backend *gpu;
static double copy_rate, product_rate; /* bytes and operations a second */

static void must(status st)
{
    if (st != OK) {
        printf("%s\n", status_message());
        exit(1);
    }
}

#define MUST(call) must(cuda_check((call), #call, __FILE__, __LINE__))

static cudaStream_t stream(void)
{
    return (cudaStream_t)gpu->stream;
}

/* ---- memory: one arena a case */

static std::vector<void *> slabs;

static void *room(size_t bytes)
{
    void *slab;
    must(gpu->reserve(gpu, &slab, bytes));
    slabs.push_back(slab);
    return slab;
}

static void forget(void)
{
    for (void *slab : slabs)
        gpu->release(gpu, slab);
    slabs.clear();
}

template <typename T> static __global__ void fill_kernel(T *x, size_t n, uint32_t seed, float scale)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u + seed;
        h = (h ^ h >> 16) * 0x7feb352du;
        h = (h ^ h >> 15) * 0x846ca68bu;
        h ^= h >> 16;
        x[i] = (T)(scale * ((float)(h >> 8) * 0x1p-23f - 1));
    }
}

static tensor random_tensor(dtype type, int64_t rows, int64_t cols, float scale)
{
    static uint32_t seed = 1;
    size_t n = (size_t)(rows * cols);
    tensor t = tensor_of(room(n * dtype_bytes(type) + 256), type, rows, cols);
    if (type == BF16)
        fill_kernel<<<1024, 256, 0, stream()>>>((bf16 *)t.data, n, seed++, scale);
    else
        fill_kernel<<<1024, 256, 0, stream()>>>((float *)t.data, n, seed++, scale);
    MUST(cudaGetLastError());
    return t;
}

static tensor upload_ints(const std::vector<int32_t> &x, int64_t cols)
{
    tensor t = tensor_of(room(x.size() * sizeof(int32_t) + 256), I32, (int64_t)x.size() / cols, cols);
    must(gpu->upload(gpu, &t, x.data(), I32));
    return t;
}

/* ---- time */

static double replay(cudaGraphExec_t run, int calls)
{
    std::vector<float> ms(5);
    cudaEvent_t from, to;
    MUST(cudaEventCreate(&from));
    MUST(cudaEventCreate(&to));
    MUST(cudaGraphLaunch(run, stream()));
    for (float &x : ms) {
        MUST(cudaEventRecord(from, stream()));
        MUST(cudaGraphLaunch(run, stream()));
        MUST(cudaEventRecord(to, stream()));
        MUST(cudaEventSynchronize(to));
        MUST(cudaEventElapsedTime(&x, from, to));
    }
    MUST(cudaEventDestroy(from));
    MUST(cudaEventDestroy(to));
    std::sort(ms.begin(), ms.end());
    return 1e-3 * ms[2] / calls;
}

static cudaGraph_t capture(const std::function<void(int)> &call, int calls)
{
    cudaGraph_t graph;
    MUST(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; i++)
        call(i);
    MUST(cudaStreamEndCapture(stream(), &graph));
    return graph;
}

static double timed(cudaGraph_t graph, int calls)
{
    cudaGraphExec_t run;
    MUST(cudaGraphInstantiate(&run, graph, 0));
    double seconds = replay(run, calls);
    MUST(cudaGraphExecDestroy(run));
    return seconds;
}

static int calls_for(double seconds)
{
    return (int)std::max(1.0, std::min(20.0, 0.02 / seconds));
}

/* Seconds of a call; `likely` is a guess that sizes the graph. */
static double measure(const std::function<void(int)> &call, double likely)
{
    int calls = calls_for(likely);
    call(0); /* sizes the scratch */
    MUST(cudaStreamSynchronize(stream()));
    cudaGraph_t graph = capture(call, calls);
    double seconds = timed(graph, calls);
    MUST(cudaGraphDestroy(graph));
    return seconds;
}

/* Each kernel of a call alone, on what the whole call left; but for sums that take turns, for which none are left. */
static void parts(const std::function<void(int)> &call, double likely)
{
    cudaGraph_t graph = capture(call, 1);
    size_t count = 0;
    MUST(cudaGraphGetNodes(graph, NULL, &count));
    std::vector<cudaGraphNode_t> node(count);
    MUST(cudaGraphGetNodes(graph, node.data(), &count));
    int calls = calls_for(likely);
    for (cudaGraphNode_t n : node) {
        cudaGraphNodeType type;
        cudaKernelNodeParams p;
        const char *name = "";
        MUST(cudaGraphNodeGetType(n, &type));
        if (type != cudaGraphNodeTypeKernel)
            continue;
        MUST(cudaGraphKernelNodeGetParams(n, &p));
        cudaFuncGetName(&name, p.func);
        if (strstr(name, "sum_stream"))
            continue;
        cudaGraph_t alone;
        cudaGraphNode_t last = NULL, next;
        MUST(cudaGraphCreate(&alone, 0));
        for (int i = 0; i < calls; i++, last = next) {
            MUST(cudaGraphAddKernelNode(&next, alone, i ? &last : NULL, i ? 1 : 0, &p));
            MUST(cudaGraphKernelNodeCopyAttributes(next, n));
        }
        printf("    %10.1f us  %.60s\n", 1e6 * timed(alone, calls), name);
        MUST(cudaGraphDestroy(alone));
    }
    MUST(cudaGraphDestroy(graph));
}

static double floor_of(double bytes, double operations)
{
    return std::max(bytes / copy_rate, operations / product_rate);
}

static void report(const char *what, double seconds, double bytes, double operations, const char *more)
{
    double floor = floor_of(bytes, operations);
    printf("%-52s %9.1f us  floor %9.1f (%s)  %5.1f %%  %6.2f TB/s  %6.1f TFLOP/s  %s\n", what, 1e6 * seconds,
           1e6 * floor, bytes / copy_rate > operations / product_rate ? "bytes" : "FLOPs", 100 * floor / seconds,
           1e-12 * bytes / seconds, 1e-12 * operations / seconds, more);
    fflush(stdout);
}

/* ---- the yardstick: y = x w^T by cuBLASLt, the best of its own choice */

static double lt_product(const tensor *y, const tensor *x, const std::vector<tensor> &w, double likely)
{
    static cublasLtHandle_t lt;
    static void *workspace;
    const size_t bytes = 64 << 20;
    if (!lt) {
        if (cublasLtCreate(&lt) != CUBLAS_STATUS_SUCCESS)
            exit(1);
        MUST(cudaMalloc(&workspace, bytes));
    }
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t found[1];
    cublasOperation_t turned = CUBLAS_OP_T;
    int n = 0;
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, (uint64_t)w[0].cols, (uint64_t)w[0].rows, w[0].ld);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, (uint64_t)x->cols, (uint64_t)x->rows, x->ld);
    cublasLtMatrixLayoutCreate(&d, CUDA_R_16BF, (uint64_t)y->cols, (uint64_t)y->rows, y->ld);
    cublasLtMatmulPreferenceCreate(&pref);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulAlgoGetHeuristic(lt, op, a, b, d, d, pref, 1, found, &n);
    if (n == 0) {
        printf("cuBLASLt knows no product of this shape\n");
        exit(1);
    }
    double seconds = measure(
        [&](int i) {
            const float one = 1, none = 0;
            if (cublasLtMatmul(lt, op, &one, w[(size_t)i % w.size()].data, a, x->data, b, &none, y->data, d, y->data, d,
                               &found[0].algo, workspace, bytes, stream()) != CUBLAS_STATUS_SUCCESS)
                exit(1);
        },
        likely);
    cublasLtMatmulPreferenceDestroy(pref);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(d);
    cublasLtMatmulDescDestroy(op);
    return seconds;
}

static void ceilings(void)
{
    const size_t bytes = 2ull << 30;
    const int64_t n = 8192;
    tensor from = random_tensor(BF16, 1, (int64_t)bytes / 2, 1);
    void *to = room(bytes);
    copy_rate =
        2.0 * (double)bytes /
        measure([&](int) { MUST(cudaMemcpyAsync(to, from.data, bytes, cudaMemcpyDeviceToDevice, stream())); }, 1e-3);
    tensor x = random_tensor(BF16, n, n, 1), w = random_tensor(BF16, n, n, 1), y = random_tensor(BF16, n, n, 1);
    product_rate = 2.0 * (double)n * (double)n * (double)n / lt_product(&y, &x, {w}, 1.5e-3);
    struct cudaDeviceProp prop;
    MUST(cudaGetDeviceProperties(&prop, cuda_of(gpu)->device));
    printf("# %s, copy %.2f TB/s (read and written), BF16 product 8192^3 %.0f TFLOP/s (cuBLASLt, random numbers)\n",
           prop.name, 1e-12 * copy_rate, 1e-12 * product_rate);
    forget();
}

/* ---- the cases */

/* `gated`: the op makes half as many outs of it. As in an iteration, twice as many rows and a block more are
 * possible. */
static void product_case(const char *name, int64_t rows, int64_t in, int64_t out, dtype type, bool gated)
{
    const int64_t possible = 2 * rows + 32;
    char what[96];
    double bytes = (double)(out * in) * (double)dtype_bytes(type) + 2.0 * (double)(rows * in) +
                   (type == F32 ? 4.0 : gated ? 1.0 : 2.0) * (double)(rows * out);
    double operations = 2.0 * (double)rows * (double)in * (double)out, likely = floor_of(bytes, operations) * 2;
    std::vector<tensor> w;
    size_t sets = std::min((size_t)24, (size_t)(150e6 / ((double)(out * in) * (double)dtype_bytes(type))) + 1);
    for (size_t i = 0; i < sets; i++)
        w.push_back(random_tensor(type, out, in, 1));
    tensor all = random_tensor(BF16, possible, in, 1), y = random_tensor(type == F32 ? F32 : BF16, possible, out, 1);
    tensor half = tensor_of(y.data, BF16, possible, out / 2), room = random_tensor(BF16, possible, out, 1);
    tensor x = all, used = upload_ints({(int32_t)rows}, 1);
    x.rows = y.rows = rows;
    all.used = (const int32_t *)used.data;
    tensor to = y;
    to.rows = possible;
    double seconds = measure(
        [&](int i) {
            const tensor *by = &w[(size_t)i % sets];
            must(gated ? gpu->gated(gpu, &half, &room, &all, by) : gpu->matmul(gpu, &to, &all, by));
        },
        likely);
    std::string more;
    if (type == BF16) {
        char text[64];
        snprintf(text, sizeof text, "cuBLASLt %.1f us", 1e6 * lt_product(&y, &x, w, likely));
        more = text;
    }
    snprintf(what, sizeof what, "%s [%lld, %lld] x [%lld, %lld]", name, (long long)rows, (long long)in, (long long)out,
             (long long)in);
    report(what, seconds, bytes, operations, more.c_str());
    forget();
}

static void products(void)
{
    static const int64_t row_counts[] = {32, 256, 1024, 2048, 4096, 8192, 16384};
    for (int64_t rows : row_counts) {
        product_case("qkv", rows, 2048, 3072, BF16, false);
        product_case("attention out", rows, 2048, 2048, BF16, false);
        product_case("shared gate and up, gated", rows, 2048, 1024, BF16, true);
        product_case("shared down", rows, 512, 2048, BF16, false);
        product_case("router", rows, 2048, 256, F32, false);
    }
}

template <typename T> static tensor upload_structs(const std::vector<T> &x)
{
    tensor t = tensor_of(room(x.size() * sizeof(T) + 256), U8, (int64_t)x.size(), sizeof(T));
    must(gpu->upload(gpu, &t, x.data(), U8));
    return t;
}

/* A layer's router by itself: `rows` fresh rows of blocks of 32, `cohort` blocks to a support. The test finds
 * that the supports hold (64 experts, a floor that everybody reaches); the build is that of a cold iteration, whose
 * candidates beyond the best K leave it one round of repair at most; once more with a bias that lets all rows choose
 * much the same. */
static void route_case(int rows, int cohort)
{
    char what[96];
    const int experts = 256, words = 8, top_k = 8, slot_count = rows / 32, cohorts = (slot_count + cohort - 1) / cohort;
    const route_rule r = {experts, top_k, 8, 4, 2.5f, true};
    const atlas_rule build = {8, 0.98f, 0.98f, 1, 96, 12}, test = {8, 0.01f, 0.98f, 1, 96, 12};
    const block_rule k = {.block_size = 32, .refresh_every = 5, .cohort = cohort, .restrict_experts = true};
    std::vector<slot> hot((size_t)slot_count), cold;
    std::vector<int32_t> fresh, position, owner, role, support;
    for (slot &s : hot) {
        s.state = SLOT_REFINING;
        s.iteration = 1;
        s.path = PATH_HOT_SKIP;
        s.fresh = slot_mask(32);
    }
    cold = hot;
    for (slot &s : cold) {
        s.iteration = 0;
        s.path = PATH_COLD;
    }
    for (int i = 0; i < rows; i++) {
        fresh.push_back(i);
        position.push_back(i % 32);
        owner.push_back(i / 32);
        role.push_back(ROW_LIVE);
    }
    for (int c = 0; c < cohorts; c++)
        for (int i = 0; i <= words; i++)
            support.push_back(i == words ? 1 : 0x11111111 << (rand() % 4));
    batch in = {};
    in.fresh = upload_ints(fresh, 1);
    in.position = upload_ints(position, 1);
    in.slot = upload_ints(owner, 1);
    in.role = upload_ints(role, 1);
    slots s = {}, s_cold = {};
    s.slot = upload_structs(hot);
    s.slot_count = slot_count;
    s_cold = s;
    s_cold.slot = upload_structs(cold);
    plans p = {.support = upload_ints(support, words + 1), .cohort_count = cohorts, .layers = 1}, p_cold = p;
    p.log = tensor_of(room((size_t)cohorts * sizeof(layer_log)), U8, cohorts, sizeof(layer_log));
    p_cold.log = p.log;
    p_cold.support = upload_ints(support, words + 1);
    tensor x = random_tensor(BF16, rows, 2048, 1), w = random_tensor(F32, experts, 2048, 0.02f);
    tensor z = random_tensor(F32, rows, experts, 2), bias = random_tensor(F32, 1, experts, 0.1f);
    tensor strong = random_tensor(F32, 1, experts, 2);
    tensor ids = upload_ints(std::vector<int32_t>((size_t)(rows * top_k)), top_k);
    tensor weights = random_tensor(F32, rows, top_k, 1);
    double logits = 4.0 * rows * experts, likely = logits / copy_rate + 20e-6;
    auto timed_as = [&](const char *name, double bytes, double operations, const std::function<void(int)> &call) {
        double seconds = measure(call, likely);
        snprintf(what, sizeof what, "%s, %d rows, cohort %d", name, rows, cohort);
        report(what, seconds, bytes, operations, "");
        return call;
    };
    timed_as("router, weight in cache", 4.0 * experts * 2048 + 2.0 * rows * 2048 + logits, 6.0 * rows * experts * 2048,
             [&](int) { must(gpu->matmul(gpu, &z, &x, &w)); });
    timed_as("route", logits + 8.0 * rows * top_k, 0,
             [&](int) { must(gpu->route(gpu, &ids, &weights, &z, &bias, &p, 0, &in, &s, &r, &k)); });
    parts(timed_as("support, tested", logits, 0,
                   [&](int) { must(gpu->support(gpu, &p, 0, &z, &bias, &in, &s, &r, &test, &k)); }),
          likely);
    timed_as("support, built", logits, 0,
             [&](int) { must(gpu->support(gpu, &p_cold, 0, &z, &bias, &in, &s_cold, &r, &build, &k)); });
    timed_as("support, built, rows alike", logits, 0,
             [&](int) { must(gpu->support(gpu, &p_cold, 0, &z, &strong, &in, &s_cold, &r, &build, &k)); });
    forget();
}

static void route(void)
{
    static const int row_counts[] = {32, 256, 1024, 2048, 4096, 8192, 16384};
    for (int rows : row_counts)
        route_case(rows, rows / 32);
    route_case(16384, 1);
    route_case(16384, 8);
}

/* All of a layer's experts on one rank. */
static expert_set random_experts(int count, int inner, int hidden, const sum_tree *tree)
{
    return {.gate_up = random_tensor(BF16, (int64_t)count * 2 * inner, hidden, 0.05f),
            .down = random_tensor(BF16, (int64_t)count * hidden, inner, 0.05f),
            .first = 0,
            .count = count,
            .inner = inner,
            .tree = tree,
            .rank = 0};
}

/* top_k different ones of the first `support` experts, ascending, at random. */
static void draw_experts(std::vector<int32_t> &ids, int support, int top_k)
{
    for (int e = 0, n = 0; e < support && n < top_k; e++)
        if (rand() % (support - e) < top_k - n) {
            ids.push_back(e);
            n++;
        }
}

/* top_k of the first `support` experts of `count`, at random. */
static void expert_case(int rows, int hidden, int inner, int count, int support, int top_k, bool each)
{
    char what[96];
    std::vector<int32_t> ids;
    std::vector<char> touched((size_t)count);
    for (int i = 0; i < rows; i++)
        draw_experts(ids, support, top_k);
    for (int32_t e : ids)
        touched[(size_t)e] = 1;
    double experts = (double)std::count(touched.begin(), touched.end(), 1), edges = (double)rows * top_k;
    sum_tree *tree;
    must(sum_tree_open(&tree, count, 8, 1));
    expert_set set = random_experts(count, inner, hidden, tree);
    tensor x = random_tensor(BF16, rows, hidden, 1), weights = random_tensor(F32, rows, top_k, 1);
    tensor y = random_tensor(F32, rows, hidden, 1), id = upload_ints(ids, top_k);
    double bytes = experts * 6.0 * hidden * inner + 6.0 * rows * hidden, operations = 6.0 * edges * hidden * inner;
    double likely = floor_of(bytes, operations) * 2;
    auto call = [&](int) { must(gpu->experts(gpu, &y, &x, &id, &weights, &set)); };
    double seconds = measure(call, likely);
    snprintf(what, sizeof what, "experts [%d, %d, %d] %d of %d, %d rows", hidden, inner, count, top_k, support, rows);
    report(what, seconds, bytes, operations, "");
    if (each)
        parts(call, likely);
    sum_tree_close(tree);
    forget();
}

static void experts(void)
{
    static const int row_counts[] = {32, 256, 1024, 2048, 4096, 8192, 16384};
    for (int rows : row_counts)
        expert_case(rows, 2048, 512, 256, 256, 8, true);
    expert_case(16, 2048, 512, 256, 64, 8, false);
    expert_case(512, 2048, 512, 256, 64, 8, false);
    expert_case(8192, 2048, 512, 256, 64, 8, false);
    expert_case(32, 4096, 1024, 256, 256, 8, true);
    expert_case(1024, 4096, 1024, 256, 256, 8, false);
    expert_case(8192, 4096, 1024, 256, 256, 8, true);
}

/* The ends of both sublayers, all rows fresh, over what the experts have left; the packed rows instead on several. */
static void residual_case(int rows, int hidden, int inner)
{
    char what[96];
    const int count = 256, top_k = 8, block = 32, slot_count = rows / block;
    const block_rule k = {.block_size = block, .refresh_every = 5, .cohort = 1};
    std::vector<int32_t> ids, order, position, owner, role((size_t)rows, ROW_LIVE);
    std::vector<slot> state((size_t)slot_count);
    for (slot &s : state)
        s.fresh = slot_mask(block);
    for (int i = 0; i < rows; i++) {
        draw_experts(ids, count, top_k);
        order.push_back(i);
        position.push_back(i % block);
        owner.push_back(i / block);
    }
    sum_tree *tree;
    must(sum_tree_open(&tree, count, 8, 1));
    expert_set set = random_experts(count, inner, hidden, tree);
    batch in = {};
    in.position = upload_ints(position, 1);
    in.slot = upload_ints(owner, 1);
    in.role = upload_ints(role, 1);
    in.place = upload_ints(order, 1);
    slots s = {};
    s.slot = upload_structs(state);
    s.slot_count = slot_count;
    tensor norm = random_tensor(F32, 1, hidden, 1), cache = random_tensor(BF16, rows, hidden, 1);
    tensor y = random_tensor(BF16, rows, hidden, 1), packed = random_tensor(F32, rows, hidden, 1), none = packed;
    tensor weights = random_tensor(F32, rows, top_k, 1), id = upload_ints(ids, top_k);
    residual r = {};
    r.x = random_tensor(BF16, rows, hidden, 1);
    r.h = random_tensor(BF16, rows, hidden, 1);
    r.norm = &norm;
    r.eps = 1e-6f;
    none.data = NULL;
    must(gpu->experts(gpu, &none, &r.x, &id, &weights, &set));
    auto timed_as = [&](const char *name, int numbers, const std::function<void(int)> &call) {
        double bytes = 2.0 * rows * hidden * numbers, seconds = measure(call, bytes / copy_rate + 5e-6);
        snprintf(what, sizeof what, "%s, %d rows of %d", name, rows, hidden);
        report(what, seconds, bytes, 0, "");
    };
    timed_as("add and norm", 4, [&](int) { must(gpu->add_norm(gpu, &r, &y, &in)); });
    timed_as("merge of terms", 4 + top_k,
             [&](int) { must(gpu->merge(gpu, &r, &none, &y, &cache, 0, &in, &s, &k)); });
    timed_as("merge of packed rows", 6, [&](int) { must(gpu->merge(gpu, &r, &packed, &y, &cache, 0, &in, &s, &k)); });
    sum_tree_close(tree);
    forget();
}

static void residuals(void)
{
    static const int row_counts[] = {32, 256, 512, 1024, 2048, 4096, 8192, 16384};
    for (int rows : row_counts)
        residual_case(rows, 2048, 512);
    residual_case(1024, 4096, 1024);
    residual_case(8192, 4096, 1024);
}

static void attention_case(int slot_count, int prefix, int heads, int kv_heads)
{
    char what[96];
    const int block = 32, dim = 128, blocks = prefix / block + 1, pages = slot_count * blocks;
    std::vector<int32_t> page((size_t)pages), spans, position, owner;
    for (int i = 0; i < pages; i++) {
        int j = rand() % (i + 1);
        page[(size_t)i] = page[(size_t)j];
        page[(size_t)j] = i;
    }
    for (int i = 0; i < slot_count; i++)
        for (int32_t x : {i, blocks - 1, i * block, 0})
            spans.push_back(x);
    for (int i = 0; i < slot_count * block; i++) {
        position.push_back((blocks - 1) * block + i % block);
        owner.push_back(i / block);
    }
    int64_t rows = (int64_t)slot_count * block;
    slots s = {};
    batch in = {};
    in.position = upload_ints(position, 1);
    in.slot = upload_ints(owner, 1);
    s.page = upload_ints(page, blocks);
    s.slot_count = slot_count;
    s.max_blocks = blocks;
    in.span = upload_ints(spans, 4);
    kv_pool kv = {.k = random_tensor(BF16, (int64_t)pages * block, kv_heads * dim, 1),
                  .v = random_tensor(BF16, (int64_t)pages * block, kv_heads * dim, 1),
                  .page_count = pages};
    tensor qkv = random_tensor(BF16, rows, (heads + 2 * kv_heads) * dim, 1),
           y = random_tensor(BF16, rows, heads * dim, 1);
    attention_rule r = {.heads = heads,
                        .kv_heads = kv_heads,
                        .head_dim = dim,
                        .rotary_dim = 64,
                        .theta = 10000,
                        .eps = 1e-6f,
                        .qk_norm = true,
                        .block_size = block};
    double keys = (double)blocks * block;
    double bytes = slot_count * keys * 4.0 * kv_heads * dim + 4.0 * (double)rows * heads * dim;
    double operations = 4.0 * (double)rows * heads * dim * keys;
    double seconds =
        measure([&](int) { must(gpu->attend(gpu, &y, &qkv, &kv, 0, &in, &s, &r)); }, floor_of(bytes, operations) * 2);
    snprintf(what, sizeof what, "attention %d / %d heads, %d blocks, prefix %d", heads, kv_heads, slot_count, prefix);
    report(what, seconds, bytes, operations, "");
    tensor norm = random_tensor(F32, 1, dim, 1); /* as in a forward: attention begins while rotation runs */
    double rotation = 4.0 * (double)rows * (heads + 2 * kv_heads) * dim;
    auto rotate = [&](int) { must(gpu->rotate(gpu, &qkv, &kv, 0, &norm, &norm, &in, &s, &r)); };
    auto rotate_attend = [&](int i) {
        rotate(i);
        must(gpu->attend(gpu, &y, &qkv, &kv, 0, &in, &s, &r));
    };
    report("    rotate", measure(rotate, floor_of(rotation, 0) * 2), rotation, 0, "");
    bytes += rotation;
    report("    rotate, attention", measure(rotate_attend, floor_of(bytes, operations) * 2), bytes, operations, "");
    forget();
}

static void attention(void)
{
    static const int counts[] = {1, 8, 32, 128, 256, 512};
    for (int prefix = 256; prefix <= 1024; prefix *= 4)
        for (int count : counts)
            attention_case(count, prefix, 16, 4);
    attention_case(1, 1024, 32, 4);
    attention_case(128, 1024, 32, 4);
}

static void head_case(int rows, int hidden)
{
    const int64_t vocab = 157184;
    char what[96];
    tensor h = random_tensor(BF16, rows, hidden, 1), w = random_tensor(BF16, vocab, hidden, 0.05f);
    tensor best = tensor_of(room((size_t)rows * sizeof(head_best)), U8, rows, sizeof(head_best));
    double bytes = 2.0 * (double)(vocab + rows) * hidden, operations = 2.0 * rows * (double)vocab * hidden;
    double likely = floor_of(bytes, operations) * 2;
    auto call = [&](int) { must(gpu->head(gpu, &best, &h, &w, 156895)); };
    double seconds = measure(call, likely);
    snprintf(what, sizeof what, "head [%lld, %d], %d rows", (long long)vocab, hidden, rows);
    report(what, seconds, bytes, operations, "");
    if (rows == 32 || rows == 8192)
        parts(call, likely);
    forget();
}

static void head(void)
{
    static const int row_counts[] = {32, 128, 256, 1024, 4096, 8192, 16384};
    for (int rows : row_counts)
        head_case(rows, 2048);
    head_case(32, 4096);
    head_case(4096, 4096);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"products", products},
               {"route", route},
               {"experts", experts},
               {"residual", residuals},
               {"attention", attention},
               {"head", head}};
    if (backend_cuda_devices() == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    must(backend_cuda_open(&gpu, 0));
    ceilings();
    for (const auto &c : all) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; i++)
            wanted |= strcmp(argv[i], c.name) == 0;
        if (wanted)
            c.run();
    }
    gpu->close(gpu);
    return 0;
}

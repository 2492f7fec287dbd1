/* Ops that the twin tests never call. */
#include "src/cpu/cpu.h"

status cpu_rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r)
{
    (void)b, (void)out, (void)s, (void)p, (void)r;
    return status_fail(FAILED, __FILE__, __LINE__, "rows is not part of this test");
}

status cpu_commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p, const block_rule *r)
{
    (void)b, (void)s, (void)best, (void)in, (void)p, (void)r;
    return status_fail(FAILED, __FILE__, __LINE__, "commit is not part of this test");
}

status cpu_support(backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in, const slots *s,
                   const route_rule *r, const atlas_rule *a, const block_rule *k)
{
    (void)b, (void)p, (void)layer, (void)z, (void)bias, (void)in, (void)s, (void)r, (void)a, (void)k;
    return status_fail(FAILED, __FILE__, __LINE__, "support is not part of this test");
}

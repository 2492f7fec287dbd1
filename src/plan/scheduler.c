#include "src/plan/scheduler.h"

int deal_next(deal *d)
{
    for (int tried = 0; tried < d->size; tried++) {
        int rank = d->next;
        d->next = (d->next + 1) % d->size;
        if (d->want[rank] > 0) {
            d->want[rank]--;
            return rank;
        }
    }
    return -1;
}

int32_t deal_evenly(int32_t total, int size, int rank)
{
    return total / size + (rank < total % size);
}

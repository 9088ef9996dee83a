// Which request is in which row, where vLLM does not say.
//
// A custom class gets no request ids, and the runner moves rows: they are swapped and condensed when requests finish,
// leave when they are preempted, and come back elsewhere. An engine that keeps something per request (an index, which
// need not be rebuilt while it follows its request) has to find the request again. A row is taken for the request a
// slot has seen where
//
// - without the tokens just sampled it is at least as long as the slot's, and
// - the tokens at up to 14 positions below the slot's length are the slot's: the last six, and those at the powers of
//   four up to 16384.
//
// It may have grown by more than was sampled, since vLLM leaves the drafter out of steps (where any request is within k
// tokens of max_model_len) in which rows grow all the same. So the next turn of a conversation goes on with the slot of
// the turn before, while there is one. A request that is absent keeps its slot until the slot is needed; the one absent
// longest gives way first.
//
// What slips through: a request that has the tokens of another at all of these positions, and differs from it
// elsewhere, may get the other's slot: where they change places, or where the other is gone. An index then describes
// another request's tokens; since hits are verified against the row that is drafted for, and drafts by the model, the
// price is a missed or a worse draft, never a wrong token. Requests that are equal as far as the slot goes (n samples
// of one prompt) may change places at no price at all.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_row_recognizer(pybind11::module_& m);

}  // namespace ngram_npu::numpy

// Finds out which request is in which row, since vLLM does not tell a custom class.
//
// A custom class gets no request ids, and the runner moves rows: it swaps and condenses them when requests finish,
// removes preempted requests, and puts them into other rows later. An engine with state per request (an index) has to
// find the request again. A row is taken to hold the request of a slot if
//
// - its length without the newly sampled tokens is at least the slot's length, and
// - the tokens at up to 14 positions below the slot's length are the slot's: the last six, and those at the powers of
//   four up to 16384.
//
// The row may have grown by more than the sampled tokens: vLLM does not call the drafter in steps in which any request
// is within k tokens of max_model_len, although rows grow in them. So the next turn of a conversation continues with
// the slot of its previous turn, if it still exists. An absent request keeps its slot until the slot is needed; the
// request absent longest loses its slot first.
//
// Limits: a request that has the tokens of another at all of these positions, but differs elsewhere, may get the other
// request's slot if they swap rows or if the other one is gone. The index then describes another request's tokens. Hits
// are verified against the row, and drafts by the model, so the result is a missed or a worse draft, never a wrong
// token. Requests that are equal up to the slot's length (n samples of one prompt) may swap slots without any effect.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_row_recognizer(pybind11::module_& m);

}  // namespace ngram_npu::numpy

// NumPy arrays as the core sees them. This is the only place that knows NumPy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "core/problem.h"

namespace forge::bindings {

// The array's memory, never a copy or a cast. Throws TypeError for what is no array or of another
// dtype than float32, float64, float16, bool and uint16, whose elements are the bits of bfloat16,
// std::invalid_argument for more than four axes and for memory that kernels cannot read in place
// (byte-swapped, misaligned).
Operand operand_of(const pybind11::handle& object, const std::string& name);

// Records {query_offset, key_start, key_end} from a C-contiguous int64 array, [B, 3] or [B, Tq, 3].
std::vector<AttnRange> ranges_of(const pybind11::handle& object);

// The way back.
pybind11::array ranges_array(const std::vector<AttnRange>& ranges);

}  // namespace forge::bindings

// The checks every entry point makes again, whatever the caller has checked: sizes, strides and
// ranges. After these, no kernel can read or write outside the arrays.
#pragma once

#include "core/problem.h"

namespace forge {

// Throws std::invalid_argument that names the option, what it is and what it may be.
void check_problem(const Problem& problem);

// Whether the array is one that the problem's sizes and dtype ask for, and, where the call writes
// it, one that can be written: no two elements on one address along an axis. Throws TypeError for
// another dtype, std::invalid_argument for another shape or stride.
void check_operand(const OperandInfo& info, const Problem& problem);

}  // namespace forge

#pragma once

#include <nanobind/nanobind.h>

// Adds `runner_kernels`, a module of what model runner V2 does to its tables in each step.
void bind_runner_kernels(nanobind::module_& m);

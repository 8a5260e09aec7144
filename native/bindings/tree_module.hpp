#pragma once

#include <nanobind/nanobind.h>

// Adds GroupTree, Draft and draft_batch to the module.
void bind_group_tree(nanobind::module_& m);

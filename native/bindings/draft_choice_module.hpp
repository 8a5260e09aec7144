#pragma once

#include <nanobind/nanobind.h>

// Adds rate_drafts, choose_drafts and count_drafts to the module.
void bind_draft_choice(nanobind::module_& m);

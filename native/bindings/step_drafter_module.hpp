#pragma once

#include <nanobind/nanobind.h>

// Adds StepDrafter, DraftStep and RUN_DRAFT_STEP to the module.
void bind_step_drafter(nanobind::module_& m);

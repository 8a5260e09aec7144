// What each file of bindings adds to the module; described in seer/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

void bind_group_tree(nanobind::module_& m);      // GroupTree and Draft
void bind_draft_choice(nanobind::module_& m);    // rate_drafts, choose_drafts, count_drafts and what goes with them
void bind_step_drafter(nanobind::module_& m);    // StepDrafter, DraftStep and RUN_DRAFT_STEP
void bind_runner_kernels(nanobind::module_& m);  // `runner_kernels`: what model runner V2 does to its tables in a step

//! Tests of the backend without a GPU (NVRTC) and on one; both are ignored by default.

mod cudnn_plans;
mod gpu;
mod nvrtc;
mod reference;

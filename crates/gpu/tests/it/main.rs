//! The backend without a GPU (NVRTC) and on one; both are ignored unless asked for.

mod cudnn_plans;
mod gpu;
mod nvrtc;
mod reference;

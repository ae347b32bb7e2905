//! Home of every unit's weights, residuals and moments on the host.
pub mod arena;

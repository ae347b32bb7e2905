//! The suite that every device passes.

//! The floating-point mode that the kernels compute in.

/// Runs `work` in the IEEE default mode (round to nearest, subnormals kept, no traps), then restores the thread's own.
///
/// Libraries built with fast-math switch flush-to-zero on for the thread that loads them, and threads inherit it.
pub fn ieee<R>(work: impl FnOnce() -> R) -> R {
    let _restore = Mode::enter();
    run(work)
}

/// Not inlined, so that no arithmetic of `work` can be moved across the switches of mode around it.
#[inline(never)]
fn run<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// The mode to go back to; restored on drop, also while unwinding.
struct Mode(Control);

impl Mode {
    fn enter() -> Self {
        let found = Control::get();
        if found.needs_change() {
            Control::DEFAULT.set();
        }
        Self(found)
    }
}

impl Drop for Mode {
    fn drop(&mut self) {
        if self.0.needs_change() {
            self.0.set();
        }
    }
}

/// MXCSR on x86-64, FPCR on AArch64.
#[derive(Clone, Copy)]
struct Control(#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), expect(dead_code))] u64);

#[cfg(target_arch = "x86_64")]
impl Control {
    /// All exceptions masked, round to nearest, neither flush-to-zero nor denormals-are-zero.
    const DEFAULT: Self = Self(0x1f80);
    /// The sticky exception flags, which are no mode.
    const FLAGS: u64 = 0x3f;

    fn get() -> Self {
        let mut value = 0u32;
        // SAFETY: stmxcsr writes four bytes to the address of `value`, which is live, and changes nothing else.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        Self(u64::from(value))
    }

    fn set(self) {
        let value = u32::try_from(self.0).expect("MXCSR has 32 bits");
        // SAFETY: ldmxcsr reads four bytes from the address of `value`. The value is the default or one that stmxcsr
        // gave, so no reserved bit is set; the mode is the default whenever code outside `ieee` of ours runs again.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags, readonly))
        };
    }

    fn needs_change(self) -> bool {
        (self.0 & !Self::FLAGS) != Self::DEFAULT.0
    }
}

#[cfg(target_arch = "aarch64")]
impl Control {
    /// No flush-to-zero, round to nearest, no traps.
    const DEFAULT: Self = Self(0);

    fn get() -> Self {
        let value: u64;
        // SAFETY: reading FPCR is allowed at user level and changes nothing.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
        Self(value)
    }

    fn set(self) {
        // SAFETY: the value is the default or one read from FPCR before.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) self.0, options(nostack, preserves_flags)) };
    }

    fn needs_change(self) -> bool {
        self.0 != Self::DEFAULT.0
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl Control {
    const DEFAULT: Self = Self(0);

    fn get() -> Self {
        Self::DEFAULT
    }

    fn set(self) {}

    fn needs_change(self) -> bool {
        false
    }
}

//! Choices made by the bytes of an input.

/// Bytes as dice: each throw uses one up, and all that come after the last are 0.
pub struct Dice<'a>(&'a [u8]);

impl<'a> Dice<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    /// One of `0..sides`.
    pub fn below(&mut self, sides: usize) -> usize {
        usize::from(self.byte()) % sides.max(1)
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Whether one of so many sides came up.
    pub fn one_in(&mut self, sides: usize) -> bool {
        self.below(sides) == sides - 1
    }

    /// The next bytes, at most so many.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn text(&mut self, most: usize) -> String {
        String::from_utf8_lossy(self.bytes(most)).into_owned()
    }

    /// Spent: what is built from here on should be small.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Dice that never run out, for spellings of a value: thrown by what is left of the input.
pub fn endless(seed: &[u8]) -> impl FnMut(usize) -> usize + use<> {
    let mut state = hash(seed);
    move |sides| {
        // A linear congruential generator is dice enough.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % sides
    }
}

/// FNV-1a.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

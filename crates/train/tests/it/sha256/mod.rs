//! SHA-256 (FIPS 180-4), in which the recordings name values.

/// Fractional bits of the cube roots of the first 64 primes, and of the square roots of the first eight.
fn roots() -> ([u32; 64], [u32; 8]) {
    let primes: Vec<u64> = (2u64..).filter(|n| (2..*n).all(|d| n % d != 0)).take(64).collect();
    // The largest r with r^power ≤ prime·2^(32·power).
    let root = |prime: u64, power: u32| {
        let (mut low, mut high) = (0u128, 1u128 << 36);
        while high - low > 1 {
            let middle = (low + high) / 2;
            // r³ has up to 108 bits.
            match middle.pow(power) <= u128::from(prime) << (32 * power) {
                true => low = middle,
                false => high = middle,
            }
        }
        low as u32
    };
    (std::array::from_fn(|i| root(primes[i], 3)), std::array::from_fn(|i| root(primes[i], 2)))
}

pub fn hex(bytes: &[u8]) -> String {
    let (constants, mut state) = roots();
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((8 * bytes.len() as u64).to_be_bytes());
    for block in padded.chunks_exact(64) {
        let mut words = [0u32; 64];
        for i in 0..64 {
            words[i] = match i {
                0..16 => u32::from_be_bytes(block[4 * i..4 * i + 4].try_into().expect("four bytes")),
                _ => {
                    let (a, b) = (words[i - 15], words[i - 2]);
                    let first = a.rotate_right(7) ^ a.rotate_right(18) ^ a >> 3;
                    let second = b.rotate_right(17) ^ b.rotate_right(19) ^ b >> 10;
                    words[i - 16].wrapping_add(first).wrapping_add(words[i - 7]).wrapping_add(second)
                }
            };
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for (word, constant) in words.into_iter().zip(constants) {
            let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = e & f ^ !e & g;
            let first = h.wrapping_add(sum).wrapping_add(choice).wrapping_add(constant).wrapping_add(word);
            let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let second = sum.wrapping_add(a & b ^ a & c ^ b & c);
            (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
        }
        for (of, next) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *of = of.wrapping_add(next);
        }
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

#[test]
fn the_digest_of_the_standard() {
    assert_eq!(hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

//! The choice of GEMM algorithms: the one in the run's record, the one cached on this machine, the fastest of a few by
//! timing, or the library's first suggestion.
//!
//! Knows products and the layout of their operands, not which product of the model they are.
#![allow(unsafe_code, reason = "runs products and copies on memory that holds nothing yet")]

use crate::cublaslt::{CublasLt, Product, ProductPlan, Scales};
use crate::disk_cache::{DiskCache, digest};
use crate::driver::{DeviceBuffer, Event, Stream};
use crate::error::{During, Error, Result};
use crate::sys::cublaslt::Algorithm;
use std::sync::Arc;

/// Names of products, and the algorithm of each in hexadecimal digits: the record of a run, so that its bits do not
/// depend on timing when it is resumed.
pub type Algorithms = program::Choices;

/// Number of suggestions that are timed.
const CANDIDATES: usize = 8;
/// Number of runs of each suggestion; the first is not counted, because it loads code.
const ROUNDS: usize = 4;
/// A suggestion must beat the library's favorite by this factor: below it the difference is noise of the clock.
const WORTHWHILE: f32 = 0.98;

/// The places of a product's operands, and all memory around them. Nothing in it is needed yet.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub addresses: [u64; 3],
    pub bias: Option<u64>,
    pub scales: Option<Scales>,
    pub arenas: &'a [&'a DeviceBuffer],
}

/// The candidates for one computation, the usual one first.
pub(crate) struct Contest<'a> {
    /// Everything that the thing's speed depends on.
    pub name: String,
    /// The names under which a choice of each candidate is recorded.
    pub ways: Vec<String>,
    /// Source texts of the candidates: a cached choice is valid as long as they stay the same.
    pub texts: &'a [&'static str],
}

impl Contest<'_> {
    fn entry(&self, stream: &Stream) -> Result<String> {
        let text = self.texts.concat();
        let version = digest(&[text.as_bytes()]);
        let device = stream.device.properties.to_string();
        Ok(entry_name(&device, stream.device.driver.version()?, &version, &self.name))
    }
}

/// Finds the algorithm of each product once.
pub(crate) struct Chooser {
    given: Algorithms,
    chosen: Algorithms,
    cache: DiskCache,
    time: bool,
    /// Workspace of timed products; while it is there the arenas hold numbers to multiply.
    workspace: Option<DeviceBuffer>,
}

impl Chooser {
    /// Makes a chooser. `given` wins over the cache, the cache over the clock. Without `time` only `given` is used.
    pub fn new(given: Algorithms, cache: DiskCache, time: bool) -> Chooser {
        Chooser { given, chosen: Algorithms::new(), cache, time, workspace: None }
    }

    /// Prefers these algorithms from now on.
    pub fn prefer(&mut self, algorithms: &Algorithms) {
        self.given.extend(algorithms.iter().map(|(name, choice)| (name.clone(), choice.clone())));
    }

    /// Returns the algorithms that were chosen so far.
    pub fn chosen(&self) -> &Algorithms {
        &self.chosen
    }

    /// Returns a product with its algorithm. May overwrite everything in the arenas.
    pub fn plan(&mut self, lt: &Arc<CublasLt>, stream: &Stream, product: Product, at: Operands) -> Result<ProductPlan> {
        let name = product.description();
        let plan = match self.chosen.get(&name).or_else(|| self.given.get(&name)) {
            Some(digits) => recorded(lt, product, digits)?,
            None if self.time => self.remembered_or_timed(lt, stream, product, &name, at)?,
            None => ProductPlan::new(lt, product)?,
        };
        self.chosen.insert(name, digits(plan.algorithm()));
        Ok(plan)
    }

    /// Returns the candidate that was chosen before: in this run, in the run's record or on this machine. Without
    /// timing the first.
    pub fn settled(&mut self, stream: &Stream, contest: &Contest) -> Result<Option<usize>> {
        let position = |way: &str| contest.ways.iter().position(|w| w == way);
        let way = match self.chosen.get(&contest.name).or_else(|| self.given.get(&contest.name)) {
            Some(way) => Some(position(way).ok_or_else(|| unknown_way(contest, way))?),
            None if !self.time => Some(0),
            None => {
                let remembered = self.cache.read(&contest.entry(stream)?);
                remembered.and_then(|bytes| position(std::str::from_utf8(&bytes).ok()?))
            }
        };
        if let Some(way) = way {
            self.chosen.insert(contest.name.clone(), contest.ways[way].clone());
        }
        Ok(way)
    }

    /// Prepares for timing, and returns the address of the workspace. Overwrites everything in the arenas at its first
    /// call.
    pub fn ready(&mut self, stream: &Stream, limit: usize, arenas: &[&DeviceBuffer]) -> Result<u64> {
        if self.workspace.is_none() {
            self.workspace = Some(DeviceBuffer::new(&stream.device, limit)?);
            arenas.iter().try_for_each(|arena| fill(stream, arena))?;
        }
        Ok(self.workspace.as_ref().expect("allocated above").address())
    }

    /// Records and caches the candidate that won by its times.
    pub fn settle(&mut self, stream: &Stream, contest: &Contest, times: &[f32]) -> Result<usize> {
        let best = pick(times);
        self.cache.write(&contest.entry(stream)?, contest.ways[best].as_bytes());
        self.chosen.insert(contest.name.clone(), contest.ways[best].clone());
        Ok(best)
    }

    /// Frees the workspace of the timed runs.
    pub fn finish(&mut self) {
        self.workspace = None;
    }

    fn remembered_or_timed(
        &mut self,
        lt: &Arc<CublasLt>,
        stream: &Stream,
        product: Product,
        name: &str,
        at: Operands,
    ) -> Result<ProductPlan> {
        let (device, version) = (stream.device.properties.to_string(), lt.version());
        let entry = entry_name(&device, stream.device.driver.version()?, &version, name);
        let remembered = self.cache.read(&entry).and_then(|bytes| {
            // An algorithm that this library rejects is timed again.
            ProductPlan::with_algorithm(lt, product, parse(std::str::from_utf8(&bytes).ok()?)?).ok()
        });
        if let Some(plan) = remembered {
            return Ok(plan);
        }
        let mut plans = ProductPlan::candidates(lt, product, CANDIDATES)?;
        let mut best = 0;
        if plans.len() > 1 {
            let times = self.time(lt, stream, &plans, at).during(|| format!("timing {product}"))?;
            best = pick(&times);
        }
        let plan = plans.swap_remove(best);
        self.cache.write(&entry, digits(plan.algorithm()).as_bytes());
        Ok(plan)
    }

    fn time(&mut self, lt: &CublasLt, stream: &Stream, plans: &[ProductPlan], at: Operands) -> Result<Vec<f32>> {
        let workspace = self.ready(stream, lt.workspace_limit, at.arenas)?;
        race(stream, at.arenas, plans.len(), |plan| {
            // SAFETY: the operands are in the arenas as the product describes them, the workspace is as large as any
            // algorithm may ask, and the stream is waited for after the run.
            unsafe { plans[plan].run(stream, at.addresses, at.bias, at.scales, workspace) }
        })
    }
}

/// Returns the least milliseconds of each of `count` candidates, which `queue` queues. The L2 cache is swept before
/// every run, and the candidates alternate, so that none profits from its place.
pub(crate) fn race(
    stream: &Stream,
    arenas: &[&DeviceBuffer],
    count: usize,
    mut queue: impl FnMut(usize) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut least = vec![f32::INFINITY; count];
    for round in 0..ROUNDS {
        let mut marks = vec![];
        for way in 0..count {
            sweep(stream, arenas)?;
            let (start, end) = (Event::new(&stream.device)?, Event::new(&stream.device)?);
            start.record(stream)?;
            queue(way)?;
            end.record(stream)?;
            marks.push((start, end));
        }
        stream.synchronise()?;
        for (least, (start, end)) in least.iter_mut().zip(&marks).filter(|_| round > 0) {
            *least = least.min(end.since(start)?);
        }
    }
    Ok(least)
}

fn unknown_way(contest: &Contest, way: &str) -> Error {
    Error::Unsupported {
        what: contest.name.clone(),
        reason: format!(
            "the run's record says `{way}`, but here there is only {}; resume with the version and the kind of GPU that \
             the run began with",
            contest.ways.join(", ")
        ),
        context: String::new(),
    }
}

/// Returns the name of a cache entry: the card, its driver, the library, and the product with its types, layouts,
/// alignments, bias and accumulation, all of which the fastest algorithm depends on.
fn entry_name(device: &str, driver: (u32, u32), library: &str, product: &str) -> String {
    let driver = format!("{}.{}", driver.0, driver.1);
    let parts = [device, &driver, library, product].map(str::as_bytes);
    format!("{}.algorithm", digest(&parts))
}

/// Returns the index of the fastest, or of the first if the fastest is hardly faster.
fn pick(times: &[f32]) -> usize {
    let best = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b])).expect("at least one plan was timed");
    if times[best] < WORTHWHILE * times[0] { best } else { 0 }
}

/// Returns a plan with the algorithm of a run's record; the library must accept it.
fn recorded(lt: &Arc<CublasLt>, product: Product, digits: &str) -> Result<ProductPlan> {
    let refused = |reason: String| Error::Unsupported {
        what: product.to_string(),
        reason: format!(
            "the run's record names an algorithm that {} {} does not take here ({reason}); resume with the \
             library and the kind of GPU that the run began with",
            lt.name(),
            lt.version()
        ),
        context: String::new(),
    };
    let algorithm = parse(digits).ok_or_else(|| refused(format!("`{digits}` is not 128 hexadecimal digits")))?;
    ProductPlan::with_algorithm(lt, product, algorithm).map_err(|error| refused(error.to_string()))
}

fn digits(algorithm: Algorithm) -> String {
    algorithm.data.iter().map(|word| format!("{word:016x}")).collect()
}

fn parse(digits: &str) -> Option<Algorithm> {
    if digits.len() != 128 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let word = |i: usize| u64::from_str_radix(&digits[16 * i..16 * (i + 1)], 16).expect("hexadecimal digits");
    Some(Algorithm { data: std::array::from_fn(word) })
}

/// Number of words of the pattern that arenas are filled with.
const PATTERN: usize = 1 << 18;

/// Fills a buffer with numbers between 2⁻⁷ and 2 of either sign, as f32 and as bf16: zeros would let
/// the GPU clock higher than real work does.
fn fill(stream: &Stream, buffer: &DeviceBuffer) -> Result<()> {
    let mut state = 0x9e37_79b9_u32;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state & 0x83ff_83ff) | 0x3c00_3c00
    };
    let pattern: Vec<u8> = (0..PATTERN).flat_map(|_| word().to_le_bytes()).collect();
    let mut filled = pattern.len().min(buffer.len());
    buffer.write(stream, 0, &pattern[..filled])?;
    while filled < buffer.len() {
        let bytes = filled.min(buffer.len() - filled);
        let target = buffer.slice(filled, bytes);
        // SAFETY: both ranges are in the buffer, the second after the first.
        unsafe { stream.copy(target, buffer.address(), bytes)? };
        filled += bytes;
    }
    Ok(())
}

/// Reads and writes more of the largest arena than the L2 cache holds.
fn sweep(stream: &Stream, arenas: &[&DeviceBuffer]) -> Result<()> {
    let Some(arena) = arenas.iter().max_by_key(|arena| arena.len()) else { return Ok(()) };
    let bytes = stream.device.properties.l2_cache.min(arena.len() / 2);
    let target = arena.slice(bytes, bytes);
    // SAFETY: two halves of a range inside the arena.
    unsafe { stream.copy(target, arena.address(), bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_favourite_stays_unless_another_is_clearly_faster() {
        assert_eq!(pick(&[1.0, 0.99, 1.2]), 0);
        assert_eq!(pick(&[1.0, 0.97, 0.9]), 2);
        assert_eq!(pick(&[0.5]), 0);
    }

    #[test]
    fn an_entry_is_for_one_product_on_one_card_with_one_driver_and_library() {
        let names = [
            entry_name("NVIDIA H200, sm_90a, 132 multiprocessors", (13, 0), "13.1.1", "product nn 4×8×8"),
            entry_name("NVIDIA H100, sm_90a, 132 multiprocessors", (13, 0), "13.1.1", "product nn 4×8×8"),
            entry_name("NVIDIA H200, sm_90a, 132 multiprocessors", (13, 1), "13.1.1", "product nn 4×8×8"),
            entry_name("NVIDIA H200, sm_90a, 132 multiprocessors", (13, 0), "13.1.0", "product nn 4×8×8"),
            entry_name("NVIDIA H200, sm_90a, 132 multiprocessors", (13, 0), "13.1.1", "product nt 4×8×8"),
        ];
        for (i, name) in names.iter().enumerate() {
            assert!(names[i + 1..].iter().all(|other| other != name), "name {i} is not its own");
        }
    }

    #[test]
    fn algorithms_survive_their_record() {
        let algorithm = Algorithm { data: [1, u64::MAX, 0, 0x0123_4567_89ab_cdef, 5, 6, 7, 8] };
        let text = digits(algorithm);
        assert_eq!(parse(&text), Some(algorithm));
        assert_eq!(parse(&text[1..]), None);
        assert_eq!(parse(&text.replace('f', "é")), None);
        assert_eq!(parse(&format!("+{}", &text[1..])), None);
    }
}

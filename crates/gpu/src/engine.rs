//! One GPU with everything that instructions need: streams, compiler, libraries, and caches of plans and kernels. Knows
//! kernels and plans, no instructions.

use crate::algorithms::{self, Algorithms, Chooser, Contest, Operands};
use crate::cublaslt::{CublasLt, Product, ProductPlan};
use crate::cudnn::sdpa::Sdpa;
use crate::cudnn::{Cudnn, Handle, Plan, Target};
use crate::disk_cache::DiskCache;
use crate::driver::{Device, DeviceBuffer, Driver, Function, Module, Properties, Stream, Watch};
use crate::error::{During, Error, Result};
use crate::fabric::Ways;
use crate::kernel_cache::KernelCache;
use crate::kernels::OwnKernel;
use crate::library::{Search, open_cublaslt, open_cudnn, open_driver, open_nvrtc};
use crate::nvrtc::{Compiler, KernelSource};
use program::{Arch, StreamId};
use std::sync::Arc;
use std::time::Duration;

/// The timeout of queued work once the other participants were stopped.
const SOON: Duration = Duration::from_secs(5);

/// The locations of libraries and caches, and the way in which instructions are run.
#[derive(Clone, Debug)]
pub struct Options {
    pub search: Search,
    /// Index of the GPU among those that are visible.
    pub device: usize,
    /// The cache of compiled kernels, cuDNN's plans and chosen algorithms.
    pub cache: DiskCache,
    /// True if the algorithm of a product is chosen by timing while loading.
    pub time_products: bool,
    /// Algorithms of an earlier session, which win over every other choice.
    pub algorithms: Algorithms,
    /// True to wait after every instruction, so that an error names the one that failed. Slow.
    pub check_each: bool,
    /// True to capture each entry point at its second run and replay it from then on. Off with `check_each`.
    pub graphs: bool,
    /// The transports that were requested for bytes between GPUs.
    pub ways: Ways,
    /// True if all ranks or stages are on one GPU, each with memory of its own: slow, for tests where there is one
    /// only.
    pub one_device: bool,
}

impl Options {
    /// Returns the defaults: device 0, the user's kernel cache, replay on.
    pub fn new(search: Search) -> Options {
        Options {
            search,
            device: 0,
            cache: DiskCache::of_user(),
            time_products: true,
            algorithms: Algorithms::new(),
            check_each: false,
            graphs: true,
            ways: Ways::default(),
            one_device: false,
        }
    }
}

/// Bytes of workspace for one product's algorithm: the recommendation of cuBLAS for Hopper.
const PRODUCT_WORKSPACE: usize = 32 << 20;

/// A product's plan in the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductId(usize);

/// An attention's plan in the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionId(usize);

/// Fields are dropped in order: the context is released last.
pub(crate) struct Engine {
    /// Plans by the product that they were made for; instructions hold indices.
    products: Vec<(Product, ProductPlan)>,
    attentions: Vec<(Sdpa, Plan)>,
    own: Vec<(OwnKernel, Arc<Module>)>,
    /// The handle, or the reason why it is missing: only programs with attention instructions need it.
    cudnn: std::result::Result<(Arc<Cudnn>, Handle), Error>,
    cublaslt: Arc<CublasLt>,
    compiler: Compiler,
    pub chooser: Chooser,
    kernel_cache: KernelCache,
    disk_cache: DiskCache,
    /// Decisions that a user should be able to see, each once.
    pub notes: Vec<String>,
    /// The stream of the computation.
    pub stream: Arc<Stream>,
    to_host: Stream,
    to_device: Stream,
    exchange: Stream,
    pub device: Arc<Device>,
}

impl Engine {
    /// Opens the libraries and the device; binds its context to this thread.
    pub fn new(options: &Options) -> Result<Engine> {
        let driver = Driver::new(open_driver(&options.search)?.table)?;
        let device = Device::open(&driver, options.device, options.search.architecture.as_deref())?;
        let compiler = Compiler::new(open_nvrtc(&options.search)?)?;
        let codes = device.properties.architecture.codes();
        let cublaslt = CublasLt::new(open_cublaslt(&options.search)?, PRODUCT_WORKSPACE, codes)?;
        let (stream, to_host, to_device) =
            (Arc::new(Stream::new(&device)?), Stream::new(&device)?, Stream::new(&device)?);
        let exchange = Stream::new(&device)?;
        let cudnn = match open_cudnn(&options.search) {
            Ok(opened) => {
                let cudnn = Cudnn::new(opened);
                let handle = Handle::new(&cudnn, &stream)?;
                Ok((cudnn, handle))
            }
            Err(missing @ Error::LibraryMissing { .. }) => Err(missing),
            Err(broken) => return Err(broken),
        };
        let disk_cache = options.cache.clone();
        let kernel_cache = KernelCache::new(disk_cache.clone());
        let chooser = Chooser::new(options.algorithms.clone(), disk_cache.clone(), options.time_products);
        let (products, attentions, own, notes) = (vec![], vec![], vec![], vec![]);
        Ok(Engine {
            chooser,
            device,
            stream,
            to_host,
            to_device,
            exchange,
            compiler,
            kernel_cache,
            disk_cache,
            cublaslt,
            cudnn,
            products,
            attentions,
            own,
            notes,
        })
    }

    /// The stream of copies from other GPUs.
    pub fn exchange(&self) -> &Stream {
        &self.exchange
    }

    pub fn stream_of(&self, id: StreamId) -> &Stream {
        match id {
            StreamId::Compute => &self.stream,
            StreamId::ToHost => &self.to_host,
            StreamId::ToDevice => &self.to_device,
            StreamId::Exchange => &self.exchange,
        }
    }

    /// True if all queued work ends soon, whichever participant has failed.
    pub fn comes_to_rest(&self) -> bool {
        let soon = Watch { timeout: SOON, ended: Box::new(|| None) };
        let mut streams = StreamId::ALL.into_iter().map(|id| self.stream_of(id));
        streams.all(|stream| self.device.bind().and_then(|()| soon.wait(String::new, || stream.has_run())).is_ok())
    }

    /// Waits for every stream to end.
    pub fn synchronise(&self) -> Result<()> {
        StreamId::ALL.into_iter().try_for_each(|id| self.stream_of(id).synchronise())
    }

    pub fn architecture(&self) -> Arch {
        self.device.properties.architecture
    }

    /// Returns the target of kernels: the architecture itself, or PTX of an older one that was requested.
    fn kernel_target(&self) -> String {
        match self.device.properties {
            Properties { architecture: Arch::Cuda(of), of_device, .. } if of_device != Arch::Cuda(of) => {
                of.virtual_target()
            }
            Properties { architecture, .. } => architecture.to_string(),
        }
    }

    /// Adds a note unless it is there already.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Notes the entries of the disk cache that could not be used or written.
    pub fn note_cache(&mut self) {
        self.disk_cache.take_notes().into_iter().for_each(|note| self.note(note));
    }

    /// Returns a handle to run cuDNN's plans with; only requested where a plan was made.
    pub fn cudnn_handle(&self) -> &Handle {
        let Ok((_, handle)) = &self.cudnn else { panic!("a cuDNN plan was made with a handle") };
        handle
    }

    /// Compiles a kernel, or reads it from the disk cache, and loads it.
    pub fn module(&self, source: &KernelSource) -> Result<Arc<Module>> {
        let fetched = self.kernel_cache.fetch(&self.compiler, source, &self.kernel_target())?;
        self.load(source.name, &fetched.code)
    }

    /// Loads many sources like [`Engine::module`]: threads compile in parallel, loading is in order.
    pub fn modules(&self, sources: &[KernelSource]) -> Result<Vec<Arc<Module>>> {
        let target = self.kernel_target();
        let (compiler, cache) = (&self.compiler, &self.kernel_cache);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(sources.len()).max(1);
        let fetch = |first: usize| {
            let mine = sources.iter().skip(first).step_by(threads);
            mine.map(|source| cache.fetch(compiler, source, &target)).collect::<Vec<_>>()
        };
        let mut fetched: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|first| scope.spawn(move || fetch(first))).collect();
            workers.into_iter().map(|w| w.join().expect("a compiling thread does not panic").into_iter()).collect()
        });
        let take = |(index, source): (usize, &KernelSource)| {
            let next = fetched[index % threads].next().expect("every thread did its share");
            self.load(source.name, &next?.code)
        };
        sources.iter().enumerate().map(take).collect()
    }

    fn load(&self, name: &str, code: &[u8]) -> Result<Arc<Module>> {
        Module::new(&self.device, code).during(|| format!("loading {name} for {}", self.architecture()))
    }

    /// Returns a function of one of the backend's own kernels.
    pub fn own_function(&mut self, kernel: OwnKernel, entry: &str) -> Result<Function> {
        if let Some((_, module)) = self.own.iter().find(|(k, _)| *k == kernel) {
            return module.function(entry);
        }
        let module = self.module(&kernel.source())?;
        self.own.push((kernel, module.clone()));
        module.function(entry)
    }

    /// Compiles in parallel and loads those of the backend's own kernels that are not loaded yet.
    pub fn load_own(&mut self, kernels: Vec<OwnKernel>) -> Result<()> {
        let missing: Vec<OwnKernel> =
            kernels.into_iter().filter(|kernel| self.own.iter().all(|(known, _)| known != kernel)).collect();
        let sources: Vec<KernelSource> = missing.iter().map(OwnKernel::source).collect();
        let modules = self.modules(&sources)?;
        self.own.extend(missing.iter().cloned().zip(modules));
        Ok(())
    }

    /// Returns the fastest candidate of a contest by timing, which `queue` queues with a workspace. May overwrite the
    /// arenas.
    pub fn race(
        &mut self,
        contest: &Contest,
        arenas: &[&DeviceBuffer],
        mut queue: impl FnMut(&Engine, usize, u64) -> Result<()>,
    ) -> Result<usize> {
        let workspace = self.chooser.ready(&self.stream, self.cublaslt.workspace_limit, arenas)?;
        let engine: &Engine = self;
        let ways = contest.ways.len();
        let times = algorithms::race(&engine.stream, arenas, ways, |way| queue(engine, way, workspace))
            .during(|| format!("timing the {}", contest.name))?;
        self.chooser.settle(&self.stream, contest, &times)
    }

    /// The plan for a product, made at its first use, which may overwrite the arenas.
    pub fn product(&mut self, product: Product, operands: Operands) -> Result<ProductId> {
        if let Some(index) = self.products.iter().position(|(p, _)| *p == product) {
            return Ok(ProductId(index));
        }
        let plan = self.chooser.plan(&self.cublaslt, &self.stream, product, operands)?;
        self.products.push((product, plan));
        Ok(ProductId(self.products.len() - 1))
    }

    pub fn product_plan(&self, id: ProductId) -> &ProductPlan {
        &self.products[id.0].1
    }

    /// cuDNN's plan for an attention, made at its first use. Fails where cuDNN is absent or no engine takes it.
    pub fn attention(&mut self, sdpa: Sdpa) -> Result<AttentionId> {
        let (cudnn, handle) = self.cudnn.as_ref().map_err(Error::clone)?;
        if let Some(index) = self.attentions.iter().position(|(known, _)| *known == sdpa) {
            return Ok(AttentionId(index));
        }
        let plan = sdpa.forward(cudnn, &Target::Device(handle), &self.disk_cache)?;
        self.attentions.push((sdpa, plan));
        Ok(AttentionId(self.attentions.len() - 1))
    }

    pub fn attention_plan(&self, id: AttentionId) -> &Plan {
        &self.attentions[id.0].1
    }
}

//! Families of series over closed sets of labels.
//!
//! A label whose values are an enum is resolved once and then found by index: counting a packet needs no
//! hashing, no lock and no allocation. The enum also limits the number of series.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use culvert_stream::CloseReason;
use metrics::{Counter, Gauge, Histogram, KeyName, Recorder as _};

use super::{METADATA, Registry, key};

/// A closed set of label values. [`label_values!`](crate::label_values) implements the trait for one label. A
/// pair of sets is the set of all pairs.
pub trait LabelSet: Copy {
    /// Returns every member.
    fn all() -> Vec<Self>;
    /// Returns the number of members.
    fn count() -> usize {
        Self::all().len()
    }
    /// Returns the member's position in [`LabelSet::all`].
    fn index(self) -> usize;
    /// Returns the label names and values of the member.
    fn labels(self) -> Vec<(&'static str, &'static str)>;
}

/// A kind of series, such as a counter.
pub trait Handle: Sized + 'static {
    /// Registers one series.
    fn register(
        registry: &Registry,
        name: &'static str,
        labels: &[(&'static str, &'static str)],
        help: &'static str,
    ) -> Self;
    /// Returns a handle that counts nothing.
    fn noop() -> &'static Self;
}

/// One metric name with one series per member of `L`. A series appears on the page with its first use, or at
/// once with [`Family::at_zero`].
pub struct Family<L, H> {
    registry: Arc<Registry>,
    name: &'static str,
    help: &'static str,
    handles: Box<[OnceLock<H>]>,
    labels: PhantomData<fn(L)>,
}

// === impl Family ===

impl<L: LabelSet, H: Handle> Family<L, H> {
    /// Creates a family without series.
    pub fn new(registry: &Arc<Registry>, name: &'static str, help: &'static str) -> Self {
        Self {
            registry: Arc::clone(registry),
            name,
            help,
            handles: L::all().iter().map(|_| OnceLock::new()).collect(),
            labels: PhantomData,
        }
    }

    /// Registers the series of `members`, so that they appear on the page before their first use.
    #[must_use]
    pub fn at_zero(self, members: impl IntoIterator<Item = L>) -> Self {
        for member in members {
            self.get(member);
        }
        self
    }

    /// Returns the series of one member.
    pub fn get(&self, member: L) -> &H {
        match self.handles.get(member.index()) {
            Some(slot) => slot.get_or_init(|| {
                H::register(&self.registry, self.name, &member.labels(), self.help)
            }),
            // An index beyond `all()` is a bug in a `LabelSet`, but must not end the program.
            None => {
                debug_assert!(false, "{}: label index out of range", self.name);
                H::noop()
            }
        }
    }
}

impl<A: LabelSet, B: LabelSet> LabelSet for (A, B) {
    fn all() -> Vec<Self> {
        let pairs = |first| B::all().into_iter().map(move |second| (first, second));
        A::all().into_iter().flat_map(pairs).collect()
    }

    fn index(self) -> usize {
        self.0.index() * B::count() + self.1.index()
    }

    fn labels(self) -> Vec<(&'static str, &'static str)> {
        [self.0.labels(), self.1.labels()].concat()
    }
}

impl LabelSet for CloseReason {
    fn all() -> Vec<Self> {
        Self::ALL.to_vec()
    }

    fn index(self) -> usize {
        usize::from(self.code())
    }

    fn labels(self) -> Vec<(&'static str, &'static str)> {
        vec![("reason", self.label())]
    }
}

/// Creates the family of closed connections that every program has, with every reason at 0.
pub fn closed_connections(registry: &Arc<Registry>) -> Family<CloseReason, Counter> {
    let name = "culvert_connections_closed_total";
    let help = "Ended connections, by close reason. Each connection has exactly one close reason.";
    Family::new(registry, name, help).at_zero(CloseReason::ALL)
}

macro_rules! handle {
    ($kind:ident, $method:ident, $describe:ident, $register:ident) => {
        impl Registry {
            /// Returns the series `name` of this kind with these labels, created empty or at 0. A histogram
            /// has the buckets given to [`Registry::new`]. The first `help` for a name is used.
            pub fn $method(
                &self,
                name: &'static str,
                labels: &[(&'static str, &str)],
                help: &'static str,
            ) -> $kind {
                let name_key = KeyName::from_const_str(name);
                self.recorder.$describe(name_key, None, help.into());
                self.recorder.$register(&key(name, labels), &METADATA)
            }
        }

        impl Handle for $kind {
            fn register(
                registry: &Registry,
                name: &'static str,
                labels: &[(&'static str, &'static str)],
                help: &'static str,
            ) -> Self {
                registry.$method(name, labels, help)
            }

            fn noop() -> &'static Self {
                static NOOP: $kind = $kind::noop();
                &NOOP
            }
        }
    };
}

handle!(Counter, counter, describe_counter, register_counter);
handle!(Gauge, gauge, describe_gauge, register_gauge);
handle!(Histogram, histogram, describe_histogram, register_histogram);

/// Declares an enum: the closed set of values of one label.
///
/// ```
/// culvert_host::label_values! {
///     /// Direction of travel.
///     pub enum Way("way") {
///         /// In.
///         In = "in",
///         /// Out.
///         Out = "out",
///     }
/// }
/// assert_eq!(Way::ALL.len(), 2);
/// assert_eq!(Way::Out.as_str(), "out");
/// ```
#[macro_export]
macro_rules! label_values {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident($label:literal) {
            $($(#[$value_meta:meta])* $variant:ident = $value:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $name { $($(#[$value_meta])* $variant,)+ }

        impl $name {
            /// Every value, in the order of declaration.
            $vis const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Returns the text of the value in the label.
            $vis const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $value,)+ }
            }
        }

        impl $crate::telemetry::metrics::LabelSet for $name {
            fn all() -> Vec<Self> {
                Self::ALL.to_vec()
            }

            fn count() -> usize {
                Self::ALL.len()
            }

            fn index(self) -> usize {
                self as usize
            }

            fn labels(self) -> Vec<(&'static str, &'static str)> {
                vec![($label, self.as_str())]
            }
        }
    };
}

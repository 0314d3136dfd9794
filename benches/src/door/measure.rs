//! Measurement of a row of a contender.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{sleep, timeout};

use crate::door::Front;
use crate::door::change;
use crate::door::contenders::{Contender, Door};
use crate::door::rows::{Kind, MANY, Row, SERVICES_MEMORY};
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::load::{self, Job};
use crate::measure::{LIMIT, Subject as _};
use crate::memory::{self, REST};
use crate::report::Figures;
use crate::rows::MIB;
use crate::stalled::{self, Crowd};
use crate::topology::Programs;

/// Clients of one node. Their pauses leave two cores idle for about half of the time.
const CROWD: Crowd = Crowd {
    echoes: 1000,
    stalled: 1,
    pause: Duration::from_millis(120),
    stagger: Duration::from_micros(120),
    // As long as the stalled connections need to fill every buffer.
    rest: Duration::from_secs(1),
};

/// Resources for all measurements.
pub struct Lab {
    /// The programs to start.
    pub programs: Programs,
    /// Seconds of load per measurement.
    pub seconds: f64,
    /// Limit of file descriptors of a process.
    pub descriptors: u64,
}

/// A running contender and the endpoints of its load. Each contender has its own endpoints, because the ports
/// of closed connections stay in use for a while.
#[derive(Debug)]
pub struct Started {
    /// The running programs.
    pub door: Door,
    endpoints: Endpoints,
}

impl Lab {
    /// Starts a contender with one Service. Most rows use this long-lived instance.
    pub async fn start(&self, contender: Contender, front: Front) -> anyhow::Result<Started> {
        let endpoints = Endpoints::start().await.context("endpoints")?;
        let target = endpoints.lean();
        let door = Door::start(contender, front, &self.programs, target, 1).await?;
        Ok(Started { door, endpoints })
    }

    /// Measures one row: on `running`, or on a contender that is started for this row.
    pub async fn measure(
        &self,
        row: &Row,
        contender: Contender,
        running: &mut Started,
    ) -> anyhow::Result<Figures> {
        let target = running.endpoints.lean();
        let measuring = async {
            match row.kind {
                Kind::Load(first) => {
                    let work = async |entry: &Entry, job: Job| load::run(entry, target, job).await;
                    crate::measure::load(&mut running.door, first, self.seconds, work).await
                }
                Kind::Crowd => {
                    let time = Duration::from_secs_f64(2.0 * self.seconds);
                    let (entry, endpoints) = (running.door.entry(), &running.endpoints);
                    stalled::measure(&CROWD, entry, endpoints, time).await
                }
                Kind::Change => {
                    let other = Endpoints::start().await.context("endpoints")?;
                    let mut door = self.fresh(contender, row, target, MANY).await?;
                    change::measure(&mut door, target, other.lean(), MANY).await
                }
                Kind::Services => {
                    let mut door = self.fresh(contender, row, target, MANY).await?;
                    sleep(REST).await;
                    let bytes = door.rss()?.context("contender has no program")?;
                    Ok(vec![(SERVICES_MEMORY, bytes as f64 / MIB)])
                }
                Kind::Idle => {
                    let count = memory::affordable(self.descriptors, contender.descriptors())?;
                    let (_endpoint, target) = self.programs.endpoint().await?;
                    let mut door = self.fresh(contender, row, target, 1).await?;
                    memory::idle(&mut door, target, count).await
                }
            }
        };
        let measured = timeout(LIMIT, measuring).await;
        measured.with_context(|| format!("not finished within {LIMIT:?}"))?
    }

    /// Starts a contender that has carried almost nothing yet.
    async fn fresh(
        &self,
        contender: Contender,
        row: &Row,
        target: std::net::SocketAddr,
        services: usize,
    ) -> anyhow::Result<Door> {
        Door::start(contender, row.front, &self.programs, target, services).await
    }
}

//! Requests to a server's switch, as in `culvert switch` and `culvert status`.

use culvert_host::flags::GoDuration;
use culvert_server::switch::status::{Progress, Request, Status};
use culvert_server::tunnel::{Kind, Mode};
use tokio::time::sleep;

use super::{LOOK_AGAIN, PATIENCE, Verdict, sample, text};
use crate::admin::{Admin, TIMEOUT};
use crate::dev::server::Server;

/// Returns the number of connections that a server has opened through a tunnel.
pub(super) async fn opened(server: &Server, tunnel: Kind) -> Result<u64, String> {
    let tunnel = tunnel.as_str();
    let series = format!("culvert_tunnel_dials_total{{tunnel=\"{tunnel}\",outcome=\"opened\"}}");
    sample(server.addresses.health, &series).await
}

/// Switches, and waits until no connection of the previous mode is left.
pub(super) async fn settled(server: &Server, mode: Mode) -> Verdict {
    let mut status = switch(server, mode).await?;
    while status.switch != Progress::Settled {
        sleep(LOOK_AGAIN).await;
        status = self::status(server).await?;
    }
    let dials: Vec<&str> = status.new_dials.iter().map(|kind| kind.as_str()).collect();
    match status.mode == mode {
        true => Ok(format!("new dials by {}", dials.join(", else "))),
        false => Err(format!("the mode is {}", status.mode)),
    }
}

/// Switches, and waits until new dials use the mode's tunnel.
pub(super) async fn diverted(server: &Server, mode: Mode) -> Result<(), String> {
    let mut status = switch(server, mode).await?;
    while status.new_dials.first() != Some(&mode.tunnel()) {
        sleep(LOOK_AGAIN).await;
        status = self::status(server).await?;
    }
    Ok(())
}

/// Sends the request of `culvert switch`. The drain time is longer than any check, so long streams survive.
async fn switch(server: &Server, mode: Mode) -> Result<Status, String> {
    let request = Request::new(mode, Some(GoDuration::from(PATIENCE * 3)));
    let switched = admin(server).switch(&request, TIMEOUT).await;
    switched.map_err(problem)
}

/// Sends the request of `culvert status`.
pub(super) async fn status(server: &Server) -> Result<Status, String> {
    admin(server).status(TIMEOUT).await.map_err(problem)
}

fn admin(server: &Server) -> Admin {
    Admin::uds(server.admin_socket.clone())
}

fn problem(error: anyhow::Error) -> String {
    text(format!("{error:#}"))
}

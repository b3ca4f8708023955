//! The user at the other end of a connection on this machine, as the system lists its sockets.
//!
//! Knows addresses and numbers of users; not what is said.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

use rustix::process::geteuid;

/// Lists of sockets with their owners, for the two forms of addresses.
const LISTS: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Returns true if the process at the other end belongs to this user, or to the system's owner. Errors: the system lists no
/// such connection.
pub fn is_own_user(stream: &TcpStream) -> io::Result<bool> {
    let (own, other) = (stream.local_addr()?, stream.peer_addr()?);
    let lists = LISTS.iter().filter_map(|list| std::fs::read_to_string(list).ok());
    let owner = lists.filter_map(|list| owner_of(&list, other, own)).next();
    let owner = owner.ok_or_else(|| io::Error::other("the system does not say whose process it is"))?;
    Ok(owner == 0 || owner == geteuid().as_raw())
}

/// The user of the socket that is at `local` and connected to `remote`.
fn owner_of(list: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let same = |text: &str, address: SocketAddr| {
        let listed = listed(text);
        listed.is_some_and(|(ip, port)| ip.to_canonical() == address.ip().to_canonical() && port == address.port())
    };
    list.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, at, to, _, _, _, _, user, ..] = fields[..] else { return None };
        if same(at, local) && same(to, remote) { user.parse().ok() } else { None }
    })
}

/// An address as the system lists it: words of 32 bits in the order of this machine, then the port.
fn listed(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| Some(u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip = match address.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().expect("four words");
            IpAddr::from(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some((ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_owner_of_a_connection_is_found() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(at) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let server = listener.accept().unwrap().0;
            assert!(is_own_user(&client).unwrap() && is_own_user(&server).unwrap(), "{at}");
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn another_users_socket_is_told_apart() {
        let list = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1001        0 1 1\n   \
             1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1002        0 1 1\n   \
             2: 0000000000000000FFFF00000100007F:0050 00000000000000000000000001000000:0051 01 0:0 0:0 0 1003 0 1\n";
        let at = |text: &str| text.parse().unwrap();
        assert_eq!(owner_of(list, at("127.0.0.1:8080"), at("127.0.0.1:50000")), Some(1001));
        assert_eq!(owner_of(list, at("127.0.0.1:50000"), at("127.0.0.1:8080")), Some(1002));
        assert_eq!(owner_of(list, at("127.0.0.1:80"), at("[::1]:81")), Some(1003));
        assert_eq!(owner_of(list, at("127.0.0.1:80"), at("127.0.0.1:80")), None);
        assert_eq!(listed("zz:1"), None);
    }
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http2"
)

// runNativeServer is a server of the native transport. It takes one agent, and
// checks what passes through it; then it prints "checked" and waits until the
// agent drains.
func runNativeServer(args []string) (result, error) {
	fs := flag.NewFlagSet("native-server", flag.ContinueOnError)
	var f nativeFlags
	f.add(fs)
	raw := fs.String("raw", "", "HOST:PORT of a raw service")
	half := fs.String("half", "", "HOST:PORT of a service that answers behind the end of its client")
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	config, err := f.tls()
	if err != nil {
		return nil, err
	}
	listener, err := tls.Listen("tcp", f.addr, config)
	if err != nil {
		return nil, err
	}
	emit(result{"event": "listening", "addr": listener.Addr().String()})
	conn, err := listener.Accept()
	if err != nil {
		return nil, err
	}
	agent, id, err := takeAgent(conn)
	if err != nil {
		return nil, err
	}
	emit(result{"event": "agent", "agentid": id})
	words, err := agent.RoundTrip(&http.Request{
		Method: http.MethodGet, URL: &url.URL{Scheme: "https", Host: "agent", Path: nativeControl},
		Header: http.Header{},
	})
	if err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	for name, check := range map[string]func() error{
		"transfers": func() error { return transfers(agent, *raw) },
		"refusal":   func() error { return refusal(agent) },
		"half":      func() error { return clientEnds(agent, *half) },
		"first":     func() error { return endpointEnds(agent) },
		"many":      func() error { return manyEchoes(agent, *raw) },
	} {
		if err := check(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	emit(result{"event": "checked"})
	word, err := bufio.NewReader(words.Body).ReadString('\n')
	if word != nativeDrain+"\n" {
		return nil, fmt.Errorf("%q, %v instead of a drain", word, err)
	}
	return nil, agent.Ping(context.Background())
}

// takeAgent reads an agent's introduction, answers it, and begins HTTP/2.
func takeAgent(conn net.Conn) (*http2.ClientConn, string, error) {
	in := bufio.NewReader(conn)
	hello, err := http.ReadRequest(in)
	if err != nil {
		return nil, "", err
	}
	if got := conn.(*tls.Conn).ConnectionState().NegotiatedProtocol; got != nativeALPN {
		return nil, "", fmt.Errorf("the agent speaks %q", got)
	}
	if hello.Header.Get("Upgrade") != nativeALPN || hello.URL.Path != "/agent" {
		return nil, "", fmt.Errorf("not an introduction: %v", hello)
	}
	_, err = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n"+
		"Upgrade: %s\r\nServerid: go\r\nServercount: 1\r\n\r\n", nativeALPN)
	if err != nil {
		return nil, "", err
	}
	agent, err := (&http2.Transport{}).NewClientConn(&aheadConn{conn, in})
	return agent, hello.Header.Get("agentid"), err
}

// tunnel is one connection through the agent.
type tunnel struct {
	io.Reader
	*io.PipeWriter
	body io.Closer
}

// Close ends both directions; a direction that goes on is reset.
func (t *tunnel) Close() error { return errors.Join(t.PipeWriter.Close(), t.body.Close()) }

func connectThrough(agent *http2.ClientConn, target string) (*tunnel, error) {
	read, write := io.Pipe()
	answer, err := agent.RoundTrip(&http.Request{
		Method: http.MethodConnect, URL: &url.URL{Scheme: "https", Host: target},
		Host: target, Header: http.Header{}, Body: read,
	})
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		text, _ := url.PathUnescape(answer.Header.Get(nativeError))
		return nil, fmt.Errorf("%d: %s", answer.StatusCode, text)
	}
	return &tunnel{answer.Body, write, answer.Body}, nil
}

func transfers(agent *http2.ClientConn, raw string) error {
	const size = 20 << 20
	down, err := connectThrough(agent, raw)
	if err != nil {
		return err
	}
	defer down.Close()
	if _, err := fmt.Fprintf(down, "download %d\n", size); err != nil {
		return err
	}
	if n, sum, err := readAllSum(down); err != nil || n != size || sum != streamSum(size) {
		return fmt.Errorf("downloaded %d bytes, %w", n, err)
	}
	up, err := connectThrough(agent, raw)
	if err != nil {
		return err
	}
	defer up.Close()
	if _, err := fmt.Fprintf(up, "upload %d\n", size); err != nil {
		return err
	}
	if err := writeStream(up, size, chunk); err != nil {
		return err
	}
	sum, err := io.ReadAll(up)
	if err != nil || string(sum) != streamSum(size)+"\n" {
		return fmt.Errorf("uploaded with digest %q, %w", sum, err)
	}
	return nil
}

func refusal(agent *http2.ClientConn) error {
	_, err := connectThrough(agent, "127.0.0.1:1")
	if err == nil || !strings.HasPrefix(err.Error(), "502: dial tcp 127.0.0.1:1: ") ||
		!strings.Contains(err.Error(), "connection refused") {
		return fmt.Errorf("refused as %v", err)
	}
	return nil
}

// clientEnds ends its direction first and is answered behind that.
func clientEnds(agent *http2.ClientConn, half string) error {
	conn, err := connectThrough(agent, half)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := writeStream(conn, 100_000, chunk); err != nil {
		return err
	}
	if err := conn.PipeWriter.Close(); err != nil {
		return err
	}
	answer, err := io.ReadAll(conn)
	if err != nil || string(answer) != "100000\n" {
		return fmt.Errorf("answered %q, %w", answer, err)
	}
	return nil
}

// endpointEnds has the endpoint end its direction first and hear what follows.
func endpointEnds(agent *http2.ClientConn) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	heard := make(chan error, 1)
	go func() {
		heard <- func() error {
			endpoint, err := listener.Accept()
			if err != nil {
				return err
			}
			defer endpoint.Close()
			if _, err := io.WriteString(endpoint, "the last I say"); err != nil {
				return err
			}
			if err := endpoint.(*net.TCPConn).CloseWrite(); err != nil {
				return err
			}
			n, sum, err := readAllSum(endpoint)
			if err != nil || n != 1<<20 || sum != streamSum(n) {
				return fmt.Errorf("the endpoint heard %d bytes, %w", n, err)
			}
			return nil
		}()
	}()
	conn, err := connectThrough(agent, listener.Addr().String())
	if err != nil {
		return err
	}
	defer conn.Close()
	said, err := io.ReadAll(conn)
	if err != nil || string(said) != "the last I say" {
		return fmt.Errorf("the endpoint said %q, %w", said, err)
	}
	if err := writeStream(conn, 1<<20, chunk); err != nil {
		return err
	}
	if err := conn.PipeWriter.Close(); err != nil {
		return err
	}
	select {
	case err := <-heard:
		return err
	case <-time.After(30 * time.Second):
		return errors.New("the endpoint does not hear the end")
	}
}

func manyEchoes(agent *http2.ClientConn, raw string) error {
	const count, rounds = 20, 50
	ended := make(chan error, count)
	for at := range count {
		go func() {
			ended <- func() error {
				conn, err := connectThrough(agent, raw)
				if err != nil {
					return err
				}
				defer conn.Close()
				if _, err := io.WriteString(conn, "echo\n"); err != nil {
					return err
				}
				out := bytes.Repeat([]byte{byte(at)}, 5000)
				in := make([]byte, len(out))
				for range rounds {
					if _, err := conn.Write(out); err != nil {
						return err
					}
					if _, err := io.ReadFull(conn, in); err != nil {
						return err
					}
					if !bytes.Equal(in, out) {
						return errors.New("an echo of something else")
					}
				}
				return nil
			}()
		}()
	}
	var all error
	for range count {
		all = errors.Join(all, <-ended)
	}
	return all
}
